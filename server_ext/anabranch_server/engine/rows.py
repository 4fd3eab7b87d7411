"""Side tables of the requests in flight, indexed by their row in `req_to_token`.

Attributes put on SGLang's batches do not survive its runners; a row does. One table a scheduler process.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from anabranch_kernels import Part


@dataclass(slots=True)
class RowTable:
    """position_offset: [rows] int64, rotary position minus index, for a request's own tokens.
    parts: the shifted parts of a row; rows that are not in it are seen where they were computed."""

    position_offset: torch.Tensor
    parts: dict[int, tuple[Part, ...]] = field(default_factory=dict)

    def set(self, rows: list[int], offsets: list[int], parts: list[tuple[Part, ...]]) -> None:
        device = self.position_offset.device
        self.position_offset[torch.tensor(rows, device=device)] = torch.tensor(offsets, device=device)
        for row, row_parts in zip(rows, parts, strict=True):
            if row_parts:
                self.parts[row] = row_parts
            else:
                self.parts.pop(row, None)

    def clear(self) -> None:
        self.position_offset.zero_()
        self.parts.clear()


_current: RowTable | None = None


def install(table: RowTable) -> None:
    """Make `table` the one that this process's attention backend reads."""
    global _current
    _current = table


def current() -> RowTable | None:
    return _current
