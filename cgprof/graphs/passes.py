"""What the forward passes inside a graph are made of, from model and config alone. Pure.

A plain key is one pass; a twin is one pass a microbatch. Sizes are those of the GPU's kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cgprof.attention.tiles import choose_splits, choose_tile
from cgprof.config.schema import All2AllBackend, ModelConfig, RunConfig
from cgprof.moe.traffic import RowFormat
from cgprof.shapes import GraphKey

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class ExchangeKind(Enum):
    """How a layer's tokens reach their experts; each has its own nodes and tensors."""

    NONE = "none"
    LOOPBACK = "loopback"
    ALL_TO_ALL = "all-to-all"
    ALL_GATHER = "all-gather"
    PEER_WRITES = "peer-writes"

    @property
    def is_between_ranks(self) -> bool:
        """Whether tokens reach other ranks."""
        return self not in (ExchangeKind.NONE, ExchangeKind.LOOPBACK)

    @property
    def has_blocks(self) -> bool:
        """Whether each rank gets a block of at most the dispatch capacity."""
        return self in (ExchangeKind.ALL_TO_ALL, ExchangeKind.PEER_WRITES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One forward pass over the padded tokens of a key or of one of its microbatches."""

    num_tokens: int
    num_splits: int  # parts of each context in attention; more than one are merged
    block_rows: int  # rows of the block that goes to one rank; on one rank the tokens
    expert_rows: int  # rows that reach this rank's experts


def exchange_kind(model: ModelConfig, run: RunConfig) -> ExchangeKind:
    """Returns the exchange of a captured step."""
    if not model.is_moe:
        return ExchangeKind.NONE
    if run.parallel.data_parallel_size == 1:
        return ExchangeKind.LOOPBACK if run.microbatch.enabled else ExchangeKind.NONE
    match run.parallel.all2all_backend:
        case All2AllBackend.ALLGATHER_REDUCESCATTER:
            return ExchangeKind.ALL_GATHER
        case All2AllBackend.SYMMETRIC_MEMORY:
            return ExchangeKind.PEER_WRITES
        case All2AllBackend.ALL_TO_ALL | All2AllBackend.EXACT:
            return ExchangeKind.ALL_TO_ALL


def passes_of(model: ModelConfig, run: RunConfig, key: GraphKey) -> tuple[Pass, ...]:
    """Returns the passes that a graph of the key holds, one a microbatch."""
    count = key.num_microbatches
    width = key.num_tokens // count
    sizes = [width] * (count - 1) + [key.num_tokens - width * (count - 1)]
    return tuple(_pass(model, run, key, size) for size in sizes)


def _pass(model: ModelConfig, run: RunConfig, key: GraphKey, num_tokens: int) -> Pass:
    kind = exchange_kind(model, run)
    block_rows, num_blocks = num_tokens, 1
    if kind.is_between_ranks:
        num_blocks = run.parallel.data_parallel_size
        capacity = run.parallel.dispatch_capacity if kind.has_blocks else None
        row = RowFormat(
            hidden_size=model.hidden_size,
            itemsize=ITEM_BYTES[model.dtype],
            top_k=model.experts_per_token,
        )
        block_rows = row.block_rows(num_tokens if capacity is None else min(num_tokens, capacity))
    return Pass(
        num_tokens=num_tokens,
        num_splits=_splits(model, run, key, num_tokens),
        block_rows=block_rows,
        expert_rows=num_blocks * block_rows,
    )


def _splits(model: ModelConfig, run: RunConfig, key: GraphKey, num_tokens: int) -> int:
    """Into how many parts attention cuts each context, as `PagedAttention` decides it."""
    if run.model.batch_invariant:
        return 1
    query_len = key.uniform_query_len or num_tokens
    tile = choose_tile(
        group=max(1, model.num_heads // model.num_kv_heads),
        head_dim=model.head_dim,
        dtype_bytes=ITEM_BYTES[model.dtype],
        single_token=query_len == 1,
    )
    num_reqs = -(-num_tokens // query_len) if key.is_twin else key.num_reqs
    return choose_splits(
        tile,
        num_tokens=num_tokens,
        num_reqs=num_tokens if num_reqs is None else num_reqs,
        num_kv_heads=model.num_kv_heads,
        max_seq_len=run.limits.max_model_len,
    )
