"""The platform under which SGLang runs on a machine without a GPU.

It adds nothing to SGLang's CPU platform except the two pool classes that an out-of-tree platform must name.
"""

from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum


class CpuPlatform(CpuSRTPlatform):
    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_mha_kv_pool_cls(self):
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_paged_allocator_cls(self):
        from anabranch_server.engine.cpu_pages import CpuPagedAllocator

        return CpuPagedAllocator
