"""Which of how many processes this one is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rank:
    """One data-parallel rank: a process with a device, a batch and a share of the experts."""

    rank: int
    size: int
    local_rank: int  # among the processes of this host; chooses the device

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"rank {self.rank} of {self.size}"
        assert 0 <= self.local_rank < self.size, f"local rank {self.local_rank} of {self.size}"
