"""The exchange of `all_to_all` without NCCL: each rank's kernel writes rows into its peers' memory.

One set of blocks a microbatch is enough, although nobody asks a peer for leave to write:

- A rank writes tokens only after it has waited for all sums of the layer before, and a peer sends
  its sums after its experts have read all tokens. So no token overwrites one still to be read.
- A rank writes sums only after it has waited for all tokens of the layer, and a peer sends its
  tokens after it has added up the sums of the layer before. So no sum overwrites one either.

Each half is thus the acknowledgement of the other. What counts is the order of a rank's kernels on
its streams, and each microbatch has its own blocks and flags, so plain steps, microbatches in
flight beside each other, replays and eager steps between them are all alike; the lane does not
matter. Flags only grow, so nothing is reset between replays. Ranks enqueue their exchanges in one
order, and a wait keeps nothing but the streams behind it from running, so the first exchange that
is not done anywhere can always be done: nobody waits for ever, unless a rank has left.

A step that all ranks drop between the halves may see tokens overwritten, in results that nobody
reads; the next exchange is whole again. One that only some drop makes the others wait, as with any
collective, until the deadline of the replay or of the capture ends them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cgprof.batch.context import Handoff
from cgprof.moe.block_layout import BlockLayout
from cgprof.moe.dispatcher import DispatchHandle, Lane
from cgprof.moe.kept_routing import KeptRouting, routed, transfer
from cgprof.moe.microbatch_buffers import MicrobatchBuffers
from cgprof.moe.packing import bring_home, unpack
from cgprof.moe.sent_blocks import SentBlocks, sent_blocks
from cgprof.moe.symmetric_memory import Half, Segment
from cgprof.moe.symmetric_rendezvous import open_peer_memory
from cgprof.moe.traffic import RowFormat
from cgprof.parallel.ep import expert_range, expert_starts
from cgprof.parallel.groups import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Buffers:
    tails: torch.Tensor  # [P * tail_rows, D], routing on its way
    tokens: Half
    sums: Half
    keeps: object


class SymmetricDispatcher:
    """One row a token and rank, written where it is needed; equal to all-to-all bit for bit.

    Only rows that have an expert at a rank travel, and each block's routing. Tokens must stay as
    they are until `dispatch` returns, since they are read where they lie.
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
        """Allocates the buffers and maps those of the peers; arguments as of all-to-all.

        Raises:
            UnsupportedError: The ranks are on CPUs.
            DeviceError: Their GPUs cannot write to each other.
            RankError: A rank did not answer.
        """
        self.lane: Lane = "eager"
        self.kept: KeptRouting | None = None
        self._rank, self._num_ranks = ranks.rank, ranks.size
        self._row = row
        self._limit = capacity
        self._own = expert_range(num_experts, ranks.size, ranks.rank)
        starts = expert_starts(num_experts, ranks.size)
        self._starts = torch.tensor(starts, dtype=torch.int32, device=ranks.device)
        self._dropped = torch.zeros(1, dtype=torch.int64, device=ranks.device)

        def allocate(num_tokens: int) -> _Buffers:
            layout = self._layout(num_tokens)
            segment = Segment(num_ranks=ranks.size, rows=layout.rows, row_bytes=row.hidden_bytes)
            memory = open_peer_memory(ranks, segment.num_bytes)
            tail_rows = ranks.size * layout.tail_rows
            return _Buffers(
                tails=torch.zeros(tail_rows, row.hidden_size, dtype=dtype, device=ranks.device),
                tokens=segment.half(0, memory, ranks.rank, dtype),
                sums=segment.half(1, memory, ranks.rank, dtype),
                keeps=memory.keeps,
            )

        self._buffers = MicrobatchBuffers(max_tokens, num_microbatches, allocate)

    def dispatch(
        self,
        hidden: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        handoff: Handoff,
        meanwhile: Callable[[], None] | None = None,
    ) -> DispatchHandle:
        """Finds the tokens' places, writes them there, and finds this rank's experts in what came.

        Raises:
            ConfigError: More tokens than the buffers hold.
        """
        from cgprof.moe.packing_triton import place_tokens
        from cgprof.moe.symmetric_triton import send_tokens, wait_for_peers

        buffers = self._buffers.of(handoff, hidden.shape[0])
        layout = self._layout(hidden.shape[0])
        tails = buffers.tails[: self._num_ranks * layout.tail_rows]
        places = place_tokens(expert_ids, weights, self._starts, tails, self._dropped, layout)

        def exchange() -> None:
            send_tokens(hidden, places, tails, buffers.tokens, self._rank, layout)
            wait_for_peers(buffers.tokens)

        handoff.communicate(transfer(self.kept, exchange), meanwhile)
        received = buffers.tokens.blocks[: layout.rows]
        routing = routed(self.kept, handoff, unpack(received, self._own, layout))
        return sent_blocks(received, routing, places, layout)

    def combine(
        self,
        handle: DispatchHandle,
        expert_out: torch.Tensor,
        handoff: Handoff,
        meanwhile: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Writes each sum to where its token came from and adds up each token's rows."""
        from cgprof.moe.symmetric_triton import return_sums, wait_for_peers

        assert isinstance(handle, SentBlocks)  # from this dispatcher's own dispatch
        sums = self._buffers.of(handoff, handle.places.shape[1]).sums

        def exchange() -> None:
            return_sums(expert_out, handle.expert_ids, sums, self._rank, handle.layout)
            wait_for_peers(sums)

        handoff.communicate(transfer(self.kept, exchange), meanwhile)
        return bring_home(sums.blocks[: handle.layout.rows], handle.places, handle.layout)

    def dropped_rows(self) -> int:
        """Returns how many (token, rank) rows found no room so far, warm-ups included."""
        return int(self._dropped.item())

    def _layout(self, num_tokens: int) -> BlockLayout:
        capacity = num_tokens if self._limit is None else min(num_tokens, self._limit)
        return BlockLayout(num_ranks=self._num_ranks, capacity=capacity, row=self._row)
