"""Memory of one size on every rank, and where the parts of an exchange lie in it.

One half of an exchange takes tokens to their experts, the other brings their sums home.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_ALIGN_BYTES = 256
_FLAG_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMemory:
    """Bytes of this rank that its peers can write. `keeps` holds what maps the peers' memory."""

    own: torch.Tensor  # [bytes] u8
    addresses: Sequence[int]  # of every rank's bytes, as this process sees them
    keeps: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """One half of a microbatch's exchange, as this rank's kernels see it.

    Flags and `waited` only grow, by one an exchange, so that a replay needs nothing from the host.
    """

    blocks: torch.Tensor  # [rows, D], what ranks write here, one block each
    blocks_at: torch.Tensor  # [P] i64, addresses of every rank's `blocks`
    flags: torch.Tensor  # [P] i64, how often each rank has signalled
    flags_at: torch.Tensor  # [P] i64, addresses of this rank's flag at every rank
    ticket: torch.Tensor  # [1] i32, blocks of the writing kernel that have ended
    waited: torch.Tensor  # [1] i64, exchanges that this rank has waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Where flags and blocks of both halves lie in the memory of a microbatch, on every rank."""

    num_ranks: int
    rows: int  # of all blocks of a half
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory."""
        return self._blocks_at(2)

    def half(self, index: int, memory: PeerMemory, rank: int, dtype: torch.dtype) -> Half:
        """Returns half 0 (tokens) or 1 (sums) of `rank`; its memory has to be zero."""
        device, width = memory.own.device, self.num_ranks * _FLAG_BYTES
        flags_at, blocks_at = index * width, self._blocks_at(index)

        def addresses(offset: int) -> torch.Tensor:
            return torch.tensor([base + offset for base in memory.addresses], device=device)

        blocks = memory.own[blocks_at : blocks_at + self.rows * self.row_bytes]
        return Half(
            blocks=blocks.view(dtype).view(self.rows, -1),
            blocks_at=addresses(blocks_at),
            flags=memory.own[flags_at : flags_at + width].view(torch.int64),
            flags_at=addresses(flags_at + rank * _FLAG_BYTES),
            ticket=torch.zeros(1, dtype=torch.int32, device=device),
            waited=torch.zeros(1, dtype=torch.int64, device=device),
        )

    def _blocks_at(self, index: int) -> int:
        return _aligned(2 * self.num_ranks * _FLAG_BYTES) + index * _aligned(
            self.rows * self.row_bytes
        )


def _aligned(size: int) -> int:
    return -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
