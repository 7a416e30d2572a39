"""Bytes that an expert exchange sends to other ranks: by its shapes, and at least. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cgprof.config.schema import All2AllBackend

_ROUTING_BYTES = 8  # of one expert of a token: its id (i32) and its weight (f32)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """A token on its way: its hidden state, then the ids and weights of its K experts.

    Ranks exchange blocks of `capacity` hidden states with the routing behind them. The routing
    fills whole rows, so that the blocks of all ranks together are one matrix [rows, D].
    """

    hidden_size: int
    itemsize: int
    top_k: int

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one hidden state, D elements."""
        return self.hidden_size * self.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one hidden state and its routing."""
        return self.hidden_bytes + self.top_k * _ROUTING_BYTES

    def block_rows(self, capacity: int) -> int:
        """Returns the rows of a block: `capacity` hidden states, and what the routing takes."""
        return capacity - (-capacity * self.top_k * _ROUTING_BYTES // self.hidden_bytes)


def bytes_moved(
    backend: All2AllBackend,
    num_tokens: int,
    num_ranks: int,
    row: RowFormat,
    capacity: int | None = None,
) -> int | None:
    """Returns what one rank sends to others for one layer's exchange of `num_tokens`, both ways.

    None for exchanges whose sizes follow the routing: `exact` moves what is needed, and
    `symmetric-memory` the rows that are needed, with the routing of a whole block for each rank.

    Args:
        backend: The exchange.
        num_tokens: The padded tokens of a rank, T.
        num_ranks: P.
        row: What a token weighs.
        capacity: The most tokens for one rank; None: all.
    """
    if backend in (All2AllBackend.EXACT, All2AllBackend.SYMMETRIC_MEMORY):
        return None
    sent = num_tokens
    if backend is All2AllBackend.ALL_TO_ALL and capacity is not None:
        sent = min(num_tokens, capacity)
    return 2 * (num_ranks - 1) * row.block_rows(sent) * row.hidden_bytes


def bytes_needed(
    expert_ids: Sequence[Sequence[int]], rank: int, starts: Sequence[int], row: RowFormat
) -> int:
    """Returns the least that `rank` must send and be sent for its tokens in one layer.

    That is one row to every other rank that has an expert of a token, and one sum back.

    Args:
        expert_ids: [T, K] of the whole model; -1 is no expert.
        rank: The tokens' rank.
        starts: [P + 1], rank p has experts starts[p] .. starts[p + 1] - 1.
        row: What a token weighs.
    """
    owner = [p for p, first in enumerate(starts[:-1]) for _ in range(first, starts[p + 1])]
    trips = sum(
        len({owner[expert] for expert in ids if expert >= 0} - {rank}) for ids in expert_ids
    )
    return trips * (row.row_bytes + row.hidden_bytes)
