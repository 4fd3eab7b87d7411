"""Which SGLang versions are supported, and the adapter of the one that is installed.

A version is one module with the functions of `v0_5_17.py`; nothing else in `engine/` may depend on a version.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

ADAPTERS = {"0.5.17": "v0_5_17"}


class UnsupportedSGLang(RuntimeError):
    """The installed SGLang, or how it was started, is not something we serve on."""


def installed() -> str:
    """The installed SGLang; raises UnsupportedSGLang if there is none."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        raise UnsupportedSGLang("SGLang is not installed. Run: pip install 'anabranch[server]'") from None


@cache
def adapter() -> ModuleType:
    """The adapter for the installed SGLang; raises UnsupportedSGLang."""
    name = ADAPTERS.get(installed())
    if name is None:
        raise UnsupportedSGLang(
            f"SGLang {installed()} is not supported; anabranch supports {', '.join(ADAPTERS)}. "
            f"Install one of these: pip install 'sglang=={next(iter(ADAPTERS))}'"
        )
    return import_module(f"anabranch_server.engine.{name}")
