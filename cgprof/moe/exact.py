"""Sends exactly the rows that are needed: the host learns the sizes first, hence no graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cgprof.batch.context import Handoff
from cgprof.errors import RecordingError
from cgprof.moe.collectives import Exchange
from cgprof.moe.dispatcher import DispatchHandle, Lane
from cgprof.moe.kept_routing import KeptRouting
from cgprof.parallel.ep import expert_range
from cgprof.parallel.groups import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent(DispatchHandle):
    tokens: tuple[torch.Tensor, ...]  # one a rank: which of [T] went there
    received_sizes: tuple[int, ...]  # [P]


class ExactDispatcher:
    """For eager steps, and a second oracle: one row a token and rank, no padding on the wire.

    Sums over ranks are f32, in rank order, and rounded once, as in `AllToAllDispatcher`. Each
    dispatch waits for the device and transfers twice: the sizes, then the rows.
    """

    def __init__(self, ranks: Ranks, *, num_experts: int) -> None:
        self.lane: Lane = "eager"
        self.kept: KeptRouting | None = None  # unused: the sizes of its rows are exchanged as well
        self._ranks = ranks
        self._ranges = [expert_range(num_experts, ranks.size, p) for p in range(ranks.size)]

    def dispatch(
        self,
        hidden: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        handoff: Handoff,
        meanwhile: Callable[[], None] | None = None,
    ) -> DispatchHandle:
        """Exchanges the sizes, waits for them, then exchanges the rows.

        Raises:
            RecordingError: The step is to be recorded.
        """
        if self.lane == "captured":
            raise RecordingError(
                "the exact exchange needs a host sync for its sizes; "
                "all-to-all and allgather-reducescatter can be captured"
            )
        tokens = tuple(self._tokens_for(expert_ids, own) for own in self._ranges)
        sizes = tuple(len(rows) for rows in tokens)
        received_sizes = self._exchange_sizes(sizes, handoff)
        index = torch.cat(tokens)
        own = self._ranges[self._ranks.rank]
        exchange = Exchange(self._ranks, self.lane)
        sent = [x.index_select(0, index) for x in (hidden, expert_ids, weights)]
        # A row without an expert more, so that even a rank that gets nothing runs its experts.
        height = sum(received_sizes)
        received = [x.new_empty(height + 1, x.shape[1]) for x in sent]
        received[1][height:] = -1

        def send() -> None:
            for target, source in zip(received, sent, strict=True):
                exchange.all_to_all(target[:height], source, received_sizes, sizes)

        handoff.communicate(send, meanwhile)
        ids = received[1]
        is_own = (ids >= own.start) & (ids < own.stop)
        return _Sent(
            hidden=received[0],
            expert_ids=torch.where(is_own, ids - own.start, -1),
            weights=received[2],
            capacity=hidden.shape[0],
            tokens=tokens,
            received_sizes=received_sizes,
        )

    def combine(
        self,
        handle: DispatchHandle,
        expert_out: torch.Tensor,
        handoff: Handoff,
        meanwhile: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Returns each row to its rank and adds up each token's rows."""
        assert isinstance(handle, _Sent)  # from this dispatcher's own dispatch
        sizes = tuple(len(rows) for rows in handle.tokens)
        returned = expert_out.new_empty(sum(sizes), expert_out.shape[1])
        exchange = Exchange(self._ranks, self.lane)
        handoff.communicate(
            lambda: exchange.all_to_all(returned, expert_out[:-1], sizes, handle.received_sizes),
            meanwhile,
        )
        total = torch.zeros(
            handle.capacity, expert_out.shape[1], dtype=torch.float32, device=expert_out.device
        )
        # One rank after the other: a token is at most once in each, so the order is fixed.
        for rows, part in zip(handle.tokens, returned.split(sizes), strict=True):
            total.index_add_(0, rows, part.to(torch.float32))
        return total.to(expert_out.dtype)

    def dropped_rows(self) -> int:
        """Returns 0: there is room for every row."""
        return 0

    def _tokens_for(self, expert_ids: torch.Tensor, own: range) -> torch.Tensor:
        wanted = ((expert_ids >= own.start) & (expert_ids < own.stop)).any(dim=1)
        return wanted.nonzero().flatten()

    def _exchange_sizes(self, sizes: tuple[int, ...], handoff: Handoff) -> tuple[int, ...]:
        sent = torch.tensor(sizes, dtype=torch.int64, device=self._ranks.device)
        received = torch.empty_like(sent)
        exchange = Exchange(self._ranks, self.lane)
        handoff.communicate(lambda: exchange.all_to_all(received, sent))
        return tuple(received.tolist())
