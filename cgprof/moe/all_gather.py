"""Gives every rank all tokens and adds up what each made of them: the oracle of the exchanges."""

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
from cgprof.moe.packing import unpack
from cgprof.moe.traffic import RowFormat
from cgprof.parallel.ep import expert_range
from cgprof.parallel.groups import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Buffers:
    sent: torch.Tensor  # [block rows, D]
    received: torch.Tensor  # [P * block rows, D]


class AllGatherDispatcher:
    """All-gather of hidden states and routing in one block, then reduce-scatter of the sums.

    The reduce-scatter adds in the dtype of hidden states. With two ranks the result is one rank's
    bit for bit where each token's experts are all of one rank, or two in f32; with more ranks the
    library chooses the order, and only the former holds.
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
    ) -> None:
        """Allocates the buffers; arguments as of `AllToAllDispatcher`."""
        self.lane: Lane = "eager"
        self.kept: KeptRouting | None = None
        self._ranks = ranks
        self._row = row
        self._own = expert_range(num_experts, ranks.size, ranks.rank)

        def allocate(num_tokens: int) -> _Buffers:
            rows = row.block_rows(num_tokens)

            def matrix(height: int) -> torch.Tensor:
                return torch.zeros(height, row.hidden_size, dtype=dtype, device=ranks.device)

            return _Buffers(sent=matrix(rows), received=matrix(rows * ranks.size))

        self._buffers = MicrobatchBuffers(max_tokens, num_microbatches, allocate)

    def dispatch(
        self,
        hidden: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        handoff: Handoff,
        meanwhile: Callable[[], None] | None = None,
    ) -> DispatchHandle:
        """Gathers every rank's tokens, and finds this rank's experts in them.

        Raises:
            ConfigError: More tokens than the buffers hold.
        """
        num_tokens = hidden.shape[0]
        buffers = self._buffers.of(handoff, num_tokens)
        block = BlockLayout(num_ranks=1, capacity=num_tokens, row=self._row)
        layout = BlockLayout(num_ranks=self._ranks.size, capacity=num_tokens, row=self._row)
        sent, received = buffers.sent[: block.rows], buffers.received[: layout.rows]
        sent[:num_tokens].copy_(hidden)
        ids, bits = block.routing(sent)[0].split(self._row.top_k, dim=1)
        ids.copy_(expert_ids)
        bits.copy_(weights.view(torch.int32))
        exchange = Exchange(self._ranks, self.lane)
        send = transfer(self.kept, lambda: exchange.all_gather(received, sent))
        handoff.communicate(send, meanwhile)
        routing = unpack(received, self._own, layout)
        local_ids, local_weights = routed(self.kept, handoff, routing)
        return DispatchHandle(
            hidden=received, expert_ids=local_ids, weights=local_weights, capacity=num_tokens
        )

    def combine(
        self,
        handle: DispatchHandle,
        expert_out: torch.Tensor,
        handoff: Handoff,
        meanwhile: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Adds up all ranks' sums of this rank's tokens."""
        rows = self._row.block_rows(handle.capacity)
        summed = expert_out.new_empty(rows, expert_out.shape[1])
        exchange = Exchange(self._ranks, self.lane)
        send = transfer(self.kept, lambda: exchange.reduce_scatter(summed, expert_out))
        if send is None:
            summed.copy_(expert_out[:rows])  # a fresh buffer, which nothing else fills
        handoff.communicate(send, meanwhile)
        return summed[: handle.capacity]

    def dropped_rows(self) -> int:
        """Returns 0: every rank gets every token."""
        return 0
