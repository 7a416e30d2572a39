"""The tensor collectives of the expert exchange, on the communicator of a lane."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from cgprof.moe.dispatcher import Lane
from cgprof.parallel.groups import Ranks
from cgprof.parallel.into_one import all_gather, reduce_scatter


class Exchange:
    """One rank's end of the collectives; `lane` chooses the communicator."""

    def __init__(self, ranks: Ranks, lane: Lane) -> None:
        self._group = ranks.captured if lane == "captured" else ranks.eager

    def all_gather(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Fills received [P * n, ...] with every rank's sent [n, ...] in rank order."""
        all_gather(received, sent, group=self._group)

    def reduce_scatter(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Fills received [n, ...] with the sum over ranks of the part of sent [P * n, ...]."""
        reduce_scatter(received, sent, group=self._group)

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int] | None = None,
        sent_sizes: Sequence[int] | None = None,
    ) -> None:
        """Sends the p-th part of `sent` to rank p; parts of one size unless sizes are given."""
        dist.all_to_all_single(
            received,
            sent,
            None if received_sizes is None else list(received_sizes),
            None if sent_sizes is None else list(sent_sizes),
            group=self._group,
        )
