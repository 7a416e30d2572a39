"""Sends each token once to every rank that has an expert of it, in blocks of a fixed capacity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cgprof.batch.context import Handoff
from cgprof.moe.block_layout import BlockLayout
from cgprof.moe.collectives import Exchange
from cgprof.moe.dispatcher import DispatchHandle, Lane
from cgprof.moe.kept_routing import KeptRouting, routed, transfer
from cgprof.moe.microbatch_buffers import MicrobatchBuffers
from cgprof.moe.packing import bring_home, pack, unpack
from cgprof.moe.sent_blocks import SentBlocks, sent_blocks
from cgprof.moe.traffic import RowFormat
from cgprof.parallel.ep import expert_range, expert_starts
from cgprof.parallel.groups import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Buffers:
    sent: torch.Tensor  # [rows + 1, D]
    received: torch.Tensor  # [rows, D]
    returned: torch.Tensor  # [rows, D]


class AllToAllDispatcher:
    """One row a token and rank; the rank sums its experts of the row before it sends them back.

    Sums over ranks are f32, in rank order, and rounded once. Equal to one rank's result bit for
    bit where each token's experts are all of one rank, or two in f32; else apart by rounding.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        num_experts: int,
        row: RowFormat,
        dtype: torch.dtype,
        max_tokens: int,
        num_microbatches: int,
        capacity: int | None = None,
    ) -> None:
        """Allocates the buffers.

        Args:
            ranks: This rank among its peers.
            num_experts: Of the whole model.
            row: What a token weighs.
            dtype: Of hidden states.
            max_tokens: The most tokens of a step.
            num_microbatches: How many parts of a step are in flight at once.
            capacity: The most tokens that go to one rank; None: all. Others are dropped.
        """
        self.lane: Lane = "eager"
        self.kept: KeptRouting | None = None
        self._ranks = ranks
        self._row = row
        self._limit = capacity
        self._own = expert_range(num_experts, ranks.size, ranks.rank)
        starts = expert_starts(num_experts, ranks.size)
        self._starts = torch.tensor(starts, dtype=torch.int32, device=ranks.device)
        self._dropped = torch.zeros(1, dtype=torch.int64, device=ranks.device)

        def allocate(num_tokens: int) -> _Buffers:
            rows = self._layout(num_tokens).rows

            def matrix(height: int) -> torch.Tensor:
                return torch.zeros(height, row.hidden_size, dtype=dtype, device=ranks.device)

            return _Buffers(sent=matrix(rows + 1), received=matrix(rows), returned=matrix(rows))

        self._buffers = MicrobatchBuffers(max_tokens, num_microbatches, allocate)

    def dispatch(
        self,
        hidden: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        handoff: Handoff,
        meanwhile: Callable[[], None] | None = None,
    ) -> DispatchHandle:
        """Packs the tokens, exchanges the blocks, and finds this rank's experts in what came.

        Raises:
            ConfigError: More tokens than the buffers hold.
        """
        buffers = self._buffers.of(handoff, hidden.shape[0])
        layout = self._layout(hidden.shape[0])
        sent, received = buffers.sent[: layout.rows], buffers.received[: layout.rows]
        places = pack(
            hidden,
            expert_ids,
            weights,
            self._starts,
            buffers.sent[: layout.rows + 1],
            self._dropped,
            layout,
        )
        exchange = Exchange(self._ranks, self.lane)
        send = transfer(self.kept, lambda: exchange.all_to_all(received, sent))
        handoff.communicate(send, meanwhile)
        routing = routed(self.kept, handoff, unpack(received, self._own, layout))
        return sent_blocks(received, routing, places, layout)

    def combine(
        self,
        handle: DispatchHandle,
        expert_out: torch.Tensor,
        handoff: Handoff,
        meanwhile: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Returns the blocks to where they came from and adds up each token's rows."""
        assert isinstance(handle, SentBlocks)  # from this dispatcher's own dispatch
        buffers = self._buffers.of(handoff, handle.places.shape[1])
        returned = buffers.returned[: handle.layout.rows]
        exchange = Exchange(self._ranks, self.lane)
        send = transfer(self.kept, lambda: exchange.all_to_all(returned, expert_out))
        handoff.communicate(send, meanwhile)
        return bring_home(returned, handle.places, handle.layout)

    def dropped_rows(self) -> int:
        """Returns how many (token, rank) rows found no room so far, warm-ups included."""
        return int(self._dropped.item())

    def _layout(self, num_tokens: int) -> BlockLayout:
        capacity = num_tokens if self._limit is None else min(num_tokens, self._limit)
        return BlockLayout(num_ranks=self._ranks.size, capacity=capacity, row=self._row)
