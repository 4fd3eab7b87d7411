"""The two entry points by which SGLang finds us.

Nothing is done here: SGLang calls these in every process that it starts, before its own imports, so they stay light.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path


def activate() -> None:
    """`sglang.srt.plugins`: install every hook. Without them the cache backend refuses to serve."""
    import_module("anabranch_server.engine.hooks").install()


def activate_platform() -> str | None:
    """`sglang.srt.platforms`: the CPU platform, only where there is no GPU."""
    if has_accelerator():
        return None
    # Threads that spin while they wait make a busy machine many times slower. The scheduler process, which is started
    # after this, reads it when it loads torch.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return "anabranch_server.engine.cpu.CpuPlatform"


def has_accelerator() -> bool:
    """Whether there is a GPU that may be used; asked without importing torch. CUDA_VISIBLE_DEVICES="" hides them."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    devices = ("/dev/nvidiactl", "/dev/kfd", "/dev/dri/renderD128", "/dev/davinci0")
    return any(Path(device).exists() for device in devices) or find_spec("torch_npu") is not None
