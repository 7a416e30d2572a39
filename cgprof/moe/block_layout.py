"""Where tokens and their routing lie in the blocks that ranks exchange."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cgprof.moe.traffic import RowFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """Blocks of `capacity` rows for `num_ranks` ranks, one after the other in [rows, D]."""

    num_ranks: int
    capacity: int
    row: RowFormat

    @property
    def block_rows(self) -> int:
        """Rows of one block, its tail included."""
        return self.row.block_rows(self.capacity)

    @property
    def tail_rows(self) -> int:
        """Rows that the routing of one block takes."""
        return self.block_rows - self.capacity

    @property
    def rows(self) -> int:
        """Rows of all blocks."""
        return self.num_ranks * self.block_rows

    def routing(self, blocks: torch.Tensor) -> torch.Tensor:
        """Returns the routing of blocks [rows, D] as a view [P, capacity, 2K] i32: ids, weights."""
        words = blocks.view(torch.int32).view(self.num_ranks, self.block_rows, -1)
        width = 2 * self.row.top_k
        flat = words[:, self.capacity :].flatten(1)[:, : self.capacity * width]
        return flat.view(self.num_ranks, self.capacity, width)
