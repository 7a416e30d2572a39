"""Batches over paged KV, and a dense oracle that knows nothing of blocks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from cgprof.attention.backend import AttentionBackend
from cgprof.batch.context import AttentionMetadata
from cgprof.kvcache.block_table import BlockTable
from cgprof.kvcache.pool import BlockPool
from cgprof.kvcache.slots import compute_slots, token_positions
from cgprof.kvcache.store import store_kv


@dataclass(frozen=True, slots=True, kw_only=True)
class Dims:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    query: torch.Tensor  # [T, H, C]
    key: torch.Tensor  # [T, G, C]
    value: torch.Tensor  # [T, G, C]
    kv_cache: torch.Tensor  # [blocks, 2, S, G, C]
    metadata: AttentionMetadata
    dense: list[tuple[torch.Tensor, torch.Tensor]]  # a request: keys and values [s, G, C]
    query_lens: list[int]
    live_slots: torch.Tensor  # every slot that holds a request's data after the step


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a batch is made into. A key fixes the padding and the two maxima."""

    dims: Dims = Dims()
    pad_tokens: int = 0
    pad_reqs: int = 0
    max_seq_len: int | None = None
    max_query_len: int | None = None
    num_blocks: int = 0  # at least
    poison: bool = True
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0


def make_batch(query_lens: list[int], seq_lens: list[int], **settings: object) -> PagedBatch:
    """Builds a batch whose cache is NaN wherever no request's token lies, when poisoned.

    A poisoned padding row's table names the blocks of request 0, and padding tokens are NaN.
    Settings are the fields of Layout.
    """
    layout = Layout(**settings)
    dims, dtype = layout.dims, layout.dtype
    generator = torch.Generator().manual_seed(layout.seed)
    table = _own_blocks(seq_lens, layout)
    slots = _new_slots(table, query_lens, seq_lens, layout)
    fill = torch.nan if layout.poison else 0.0
    kv_shape = (table.num_pool_blocks, 2, dims.block_size, dims.num_kv_heads, dims.head_dim)
    kv_cache = torch.full(kv_shape, fill, dtype=dtype)
    dense, live = [], []
    for r, (q, s) in enumerate(zip(query_lens, seq_lens, strict=True)):
        shape = (s, dims.num_kv_heads, dims.head_dim)
        keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        position = torch.arange(s)
        blocks = torch.from_numpy(table.array[r].astype(np.int64))[position // dims.block_size]
        offsets = position % dims.block_size
        old = s - q
        kv_cache[blocks[:old], 0, offsets[:old]] = keys[:old]
        kv_cache[blocks[:old], 1, offsets[:old]] = values[:old]
        dense.append((keys.to(layout.device), values.to(layout.device)))
        live.append(blocks * dims.block_size + offsets)

    def pad(rows: torch.Tensor) -> torch.Tensor:
        tail = torch.full((layout.pad_tokens, *rows.shape[1:]), fill, dtype=dtype)
        return torch.cat([rows.cpu(), tail]).to(layout.device)

    def new_rows(part: int) -> torch.Tensor:
        pairs = zip(dense, query_lens, strict=True)
        return torch.cat([pair[part][len(pair[part]) - q :] for pair, q in pairs])

    query = torch.randn(sum(query_lens), dims.num_heads, dims.head_dim, generator=generator).to(
        dtype
    )
    return PagedBatch(
        query=pad(query),
        key=pad(new_rows(0)),
        value=pad(new_rows(1)),
        kv_cache=kv_cache.to(layout.device),
        metadata=_metadata(table, slots, query_lens, seq_lens, layout),
        dense=dense,
        query_lens=query_lens,
        live_slots=torch.cat(live).to(layout.device),
    )


class _PooledTable(BlockTable):
    num_pool_blocks: int


def _own_blocks(seq_lens: list[int], layout: Layout) -> _PooledTable:
    size = layout.dims.block_size
    width = -(-max(*seq_lens, layout.max_seq_len or 1) // size)
    num_blocks = max(sum(-(-s // size) for s in seq_lens) + 9, layout.num_blocks)
    pool = BlockPool(num_blocks)
    table = _PooledTable(len(seq_lens) + layout.pad_reqs, width, size, pool)
    table.num_pool_blocks = num_blocks
    pool.allocate(3)
    rows = np.arange(len(seq_lens), dtype=np.int32)
    # Two steps of growth interleave the requests' blocks.
    table.ensure(rows, np.array(seq_lens, np.int32) // 2)
    table.ensure(rows, np.array(seq_lens, np.int32))
    return table


def _new_slots(
    table: BlockTable, query_lens: list[int], seq_lens: list[int], layout: Layout
) -> torch.Tensor:
    slots = np.full(sum(query_lens) + layout.pad_tokens, -1, np.int64)
    queries = np.array(query_lens, np.int32)
    starts = np.array(seq_lens, np.int32) - queries
    token_rows = np.repeat(np.arange(queries.size), queries)
    positions = np.empty(token_rows.size, np.int64)
    token_positions(starts, queries, positions)
    compute_slots(table.array, token_rows, positions, table.block_size, slots[: positions.size])
    return torch.from_numpy(slots)


def _metadata(
    table: BlockTable,
    slots: torch.Tensor,
    query_lens: list[int],
    seq_lens: list[int],
    layout: Layout,
) -> AttentionMetadata:
    if layout.poison:
        table.array[len(seq_lens) :] = table.array[0]
    start_loc = np.cumsum([0, *query_lens, *[0] * layout.pad_reqs]).astype(np.int32)
    lengths = torch.tensor([*seq_lens, *[0] * layout.pad_reqs], dtype=torch.int32)
    return AttentionMetadata(
        query_start_loc=torch.from_numpy(start_loc).to(layout.device),
        seq_lens=lengths.to(layout.device),
        block_table=torch.from_numpy(table.array).to(layout.device),
        slot_mapping=slots.to(layout.device),
        max_query_len=layout.max_query_len or max(query_lens),
        max_seq_len=layout.max_seq_len or max(seq_lens),
    )


def dense_attention(batch: PagedBatch) -> torch.Tensor:
    """Each request by itself through SDPA in float32; padding rows are zero. [T, H, C]."""
    out = torch.zeros_like(batch.query, dtype=torch.float32)
    first = 0
    for length, (keys, values) in zip(batch.query_lens, batch.dense, strict=True):
        if not length:
            continue
        total = keys.shape[0]
        mask = torch.ones(length, total, dtype=torch.bool, device=out.device)
        out[first : first + length] = F.scaled_dot_product_attention(
            batch.query[first : first + length].float().transpose(0, 1)[None],
            keys.float().transpose(0, 1)[None],
            values.float().transpose(0, 1)[None],
            attn_mask=mask.tril(total - length),
            enable_gqa=True,
        )[0].transpose(0, 1)
        first += length
    return out


def stored_kv(batch: PagedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """What the cache holds at the live slots, keys and values [sum of s, G, C]."""
    block_size = batch.kv_cache.shape[2]
    blocks, offsets = batch.live_slots // block_size, batch.live_slots % block_size
    return batch.kv_cache[blocks, 0, offsets], batch.kv_cache[blocks, 1, offsets]


# name -> query lengths, sequence lengths, padding tokens, padding requests, max_seq_len
BATCHES: dict[str, tuple[list[int], list[int], int, int, int]] = {
    "one token": ([1], [1], 0, 0, 1),
    "decodes at block edges": ([1] * 5, [1, 15, 16, 17, 257], 3, 3, 257),
    "decodes with room": ([1] * 3, [2, 65, 128], 1, 1, 600),
    "one request with all tokens": ([37], [37], 3, 4, 40),
    "chunk of a prefill": ([19], [83], 0, 0, 1200),
    "prefill beside decodes": ([1, 1, 1, 21], [16, 257, 1, 33], 8, 4, 257),
    "several prefills": ([15, 16, 17, 1], [15, 48, 17, 1], 0, 0, 64),
    "requests without tokens": ([0, 3, 0, 1], [0, 5, 0, 31], 5, 1, 33),
}


def named_batch(name: str, **overrides: object) -> PagedBatch:
    query_lens, seq_lens, pad_tokens, pad_reqs, max_seq_len = BATCHES[name]
    settings = {"pad_tokens": pad_tokens, "pad_reqs": pad_reqs, "max_seq_len": max_seq_len}
    return make_batch(query_lens, seq_lens, **(settings | overrides))


def differences(batch: PagedBatch, out: torch.Tensor) -> dict[str, float]:
    """How far a result is from the dense oracle, and how many rows are not as they must be."""
    expected = dense_attention(batch)
    num_real = sum(batch.query_lens)
    keys, values = stored_kv(batch)
    return {
        "max_abs_diff": (out.float() - expected).abs().max().item(),
        "padding_not_zero": int(torch.count_nonzero(out[num_real:])),
        "kv_wrong": int(torch.count_nonzero(keys != torch.cat([k for k, _ in batch.dense])))
        + int(torch.count_nonzero(values != torch.cat([v for _, v in batch.dense]))),
    }


def store_and_attend(backend: AttentionBackend, batch: PagedBatch) -> torch.Tensor:
    """The attention output once the batch's keys and values are in their slots."""
    store_kv(batch.key, batch.value, batch.kv_cache, batch.metadata.slot_mapping)
    return backend.attend(batch.query, batch.kv_cache, batch.metadata)


def cut_batch(batch: PagedBatch, first: int, last: int) -> PagedBatch:
    """Tokens [first, last) as a batch of their own, as a microbatch has them.

    Stores the keys of the whole batch, since tokens before `first` have run already.
    """
    store_kv(batch.key, batch.value, batch.kv_cache, batch.metadata.slot_mapping)
    starts = batch.metadata.query_start_loc
    lengths = batch.metadata.seq_lens - (starts[1:] - last).clamp(min=0)
    metadata = dataclasses.replace(
        batch.metadata,
        query_start_loc=starts.clamp(first, last) - first,
        seq_lens=lengths.clamp(min=0),
        slot_mapping=batch.metadata.slot_mapping[first:last],
    )
    return dataclasses.replace(
        batch,
        query=batch.query[first:last],
        key=batch.key[first:last],
        value=batch.value[first:last],
        metadata=metadata,
    )


def drop_requests(batch: PagedBatch, keep: int) -> PagedBatch:
    """A decode batch after all but the first requests left: their rows are padding.

    Table rows keep what they held; padding tokens are NaN.
    """
    metadata = dataclasses.replace(
        batch.metadata,
        query_start_loc=batch.metadata.query_start_loc.clamp(max=keep),
        seq_lens=batch.metadata.seq_lens.clone(),
        slot_mapping=batch.metadata.slot_mapping.clone(),
    )
    metadata.seq_lens[keep:] = 0
    metadata.slot_mapping[keep:] = -1
    rows = [tensor.clone() for tensor in (batch.query, batch.key, batch.value)]
    for tensor in rows:
        tensor[keep:] = torch.nan
    return dataclasses.replace(batch, query=rows[0], key=rows[1], value=rows[2], metadata=metadata)
