"""SGLang's paged allocator on a machine without a GPU: where its kernels need Triton, plain Python.

Which pages are free is SGLang's own bookkeeping; here is only what extends a request by some tokens.
"""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator


class CpuPagedAllocator(PagedTokenToKVPoolAllocator):
    """Pages without Triton. Lengths are [requests] int64; `last_loc` [requests]: the slot before the first new one."""

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """The rest of the page that `last_loc` is in, then fresh pages; None if there are not enough."""
        return self._continue(prefix_lens_cpu.tolist(), seq_lens_cpu.tolist(), last_loc.tolist())

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        return self._continue((seq_lens_cpu - 1).tolist(), seq_lens_cpu.tolist(), last_loc.tolist())

    def _continue(self, starts: list[int], stops: list[int], last: list[int]) -> torch.Tensor | None:
        size, slots = self.page_size, []
        for start, before in zip(starts, last, strict=True):
            assert (before + 1) % size == start % size, "the first new slot does not continue its page"
        needed = [-(-stop // size) - -(-start // size) for start, stop in zip(starts, stops, strict=True)]
        if self.need_sort and sum(needed) > len(self.free_pages):
            self.merge_and_sort_free()
        if sum(needed) > len(self.free_pages):
            return None
        fresh, self.free_pages = self.free_pages[: sum(needed)], self.free_pages[sum(needed) :]
        inside = torch.arange(size)
        for start, stop, before, pages in zip(starts, stops, last, fresh.split(needed), strict=True):
            rest = before + 1 + inside[: -start % size]
            slots.append(torch.cat([rest, (pages[:, None] * size + inside).flatten()])[: stop - start])
        return torch.cat(slots)
