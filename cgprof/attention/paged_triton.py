"""Paged attention kernels: one for any batch, and one that merges the parts of long contexts.

Grids and sizes come from the key; lengths and tables are read on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cgprof.attention.tiles import MAX_SPLITS, Tile
from cgprof.batch.context import AttentionMetadata

# Stands for minus infinity where a difference of two must not be NaN.
_LOWEST = tl.constexpr(-1e30)
_LOG2_E = 1.4426950408889634


@triton.jit
def _find_request(query_start_loc, tile, num_reqs, TILE_TOKENS: tl.constexpr):
    """Returns the last request whose first tile is not after `tile`; num_reqs means padding."""
    low = tile * 0
    high = num_reqs + 1
    while high - low > 1:
        middle = (low + high) // 2
        first_tile = tl.load(query_start_loc + middle) // TILE_TOKENS + middle
        low = tl.where(first_tile <= tile, middle, low)
        high = tl.where(first_tile <= tile, high, middle)
    return low


@triton.jit(
    do_not_specialize=["num_tokens", "num_reqs"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_table"],
)
def attention_kernel(
    query,
    kv_cache,
    out,
    log_sums,
    query_start_loc,
    seq_lens,
    block_table,
    num_tokens,
    num_reqs,
    scale,
    stride_token,
    stride_head,
    stride_block,
    stride_kv,
    stride_slot,
    stride_kv_head,
    stride_table,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KV: tl.constexpr,
    SINGLE_TOKEN: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program a (tile of one request's query tokens, KV head, part of its context).

    `out` is [parts, T, H, C], `log_sums` [parts, T, H] in base 2. With SINGLE_TOKEN, tile i is
    token i is request i; otherwise request r starts at tile query_start_loc[r] // tokens + r, and
    the tokens past the last request are one request more, of length 0.
    """
    TILE_TOKENS: tl.constexpr = TILE_ROWS // GROUP_PADDED
    # Long tiles come first: under a causal mask a request's last tokens see the most.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    num_parts = tl.num_programs(2)

    if SINGLE_TOKEN:
        request = tile
        start = tile
        is_real = request < num_reqs
        end = tl.load(query_start_loc + request + 1, mask=is_real, other=0)
        is_real = is_real & (end == tile + 1)
        end = tile + 1
    else:
        request = _find_request(query_start_loc, tile, num_reqs, TILE_TOKENS)
        is_real = request < num_reqs
        first = tl.load(query_start_loc + request)
        start = first + (tile - first // TILE_TOKENS - request) * TILE_TOKENS
        end = tl.load(query_start_loc + request + 1, mask=is_real, other=num_tokens)
    if start >= end:
        return
    seq_len = tl.load(seq_lens + request, mask=is_real, other=0)

    rows = tl.arange(0, TILE_ROWS)
    dims = tl.arange(0, HEAD_DIM)
    tokens = start + rows // GROUP_PADDED
    heads = kv_head * GROUP + rows % GROUP_PADDED
    row_inside = (tokens < end) & (rows % GROUP_PADDED < GROUP)
    last_seen = seq_len - end + tokens
    used = seq_len - end + tl.minimum(start + TILE_TOKENS, end)
    num_kv_tiles = tl.cdiv(tl.maximum(used, 0), TILE_KV)
    if SPLIT:
        tiles_per_part = tl.cdiv(num_kv_tiles, num_parts)
        first_kv = part * tiles_per_part
        last_kv = tl.minimum(first_kv + tiles_per_part, num_kv_tiles)
    else:
        first_kv = tile * 0
        last_kv = num_kv_tiles

    query_offsets = tokens.to(tl.int64) * stride_token + heads * stride_head
    queries = tl.load(
        query + query_offsets[:, None] + dims[None, :],
        mask=row_inside[:, None] & (seq_len > 0),
        other=0.0,
    )
    highest = tl.full([TILE_ROWS], _LOWEST, tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    attended = tl.zeros([TILE_ROWS, HEAD_DIM], tl.float32)
    table = block_table + request * stride_table
    for kv_tile in range(first_kv, last_kv):
        positions = kv_tile * TILE_KV + tl.arange(0, TILE_KV)
        is_used = positions < used
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=is_used, other=0).to(tl.int64)
        kv_offsets = (
            blocks * stride_block
            + (positions % BLOCK_SIZE) * stride_slot
            + kv_head * stride_kv_head
        )
        kv = kv_cache + kv_offsets[:, None] + dims[None, :]
        keys = tl.load(kv, mask=is_used[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        seen = is_used[None, :] & (positions[None, :] <= last_seen[:, None])
        scores = tl.where(seen, scores, _LOWEST)
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        # A tile that a row does not see leaves the row's state bitwise as it was.
        rescale = tl.exp2(highest - new_highest)
        weights = tl.where(seen, tl.exp2(scores - new_highest[:, None]), 0.0)
        values = tl.load(kv + stride_kv, mask=is_used[:, None], other=0.0)
        total = total * rescale + tl.sum(weights, 1)
        attended = attended * rescale[:, None] + tl.dot(
            weights.to(values.dtype), values, input_precision=PRECISION
        )
        highest = new_highest

    is_empty = total == 0.0
    attended = attended / tl.where(is_empty, 1.0, total)[:, None]
    out_rows = (part.to(tl.int64) * num_tokens + tokens) * NUM_HEADS + heads
    tl.store(
        out + out_rows[:, None] * HEAD_DIM + dims[None, :],
        attended.to(out.dtype.element_ty),
        mask=row_inside[:, None],
    )
    if SPLIT:
        log_sum = highest + tl.log2(tl.where(is_empty, 1.0, total))
        tl.store(log_sums + out_rows, tl.where(is_empty, float("-inf"), log_sum), mask=row_inside)


@triton.jit(do_not_specialize=["num_parts", "num_rows"])
def merge_kernel(
    partial,
    log_sums,
    out,
    num_parts,
    num_rows,
    HEAD_DIM: tl.constexpr,
    MAX_PARTS: tl.constexpr,
):
    """One program a row of [T * H]: the parts' averages, weighted by their sums of exponentials."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, MAX_PARTS)
    dims = tl.arange(0, HEAD_DIM)
    rows = parts.to(tl.int64) * num_rows + row
    log_sum = tl.load(log_sums + rows, mask=parts < num_parts, other=float("-inf"))
    highest = tl.maximum(tl.max(log_sum, 0), _LOWEST)
    weights = tl.exp2(log_sum - highest)
    averages = tl.load(
        partial + rows[:, None] * HEAD_DIM + dims[None, :],
        mask=(weights > 0.0)[:, None],
        other=0.0,
    )
    total = tl.sum(weights, 0)
    merged = tl.sum(averages * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * HEAD_DIM + dims, merged.to(out.dtype.element_ty))


def attend_paged(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    tile: Tile,
    num_splits: int,
) -> torch.Tensor:
    """Enqueues the attention of a batch whose keys and values are stored already.

    Args:
        query: [T, H, C], each head contiguous.
        kv_cache: One layer [blocks, 2, S, G, C].
        metadata: The batch.
        tile: Sizes of a program's work.
        num_splits: Parts of each context, at most MAX_SPLITS.

    Returns:
        [T, H, C], contiguous.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_reqs = metadata.seq_lens.shape[0]
    num_kv_heads = kv_cache.shape[3]
    assert query.stride(2) == kv_cache.stride(4) == 1
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=query.dtype, device=query.device)
    partial, log_sums = out, out
    if num_splits > 1:
        shape = (num_splits, num_tokens, num_heads)
        partial = torch.empty(*shape, head_dim, dtype=torch.float32, device=query.device)
        log_sums = torch.empty(shape, dtype=torch.float32, device=query.device)
    attention_kernel[(tile.count(num_tokens, num_reqs), num_kv_heads, num_splits)](
        query,
        kv_cache,
        partial,
        log_sums,
        metadata.query_start_loc,
        metadata.seq_lens,
        metadata.block_table,
        num_tokens,
        num_reqs,
        head_dim**-0.5 * _LOG2_E,
        query.stride(0),
        query.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        kv_cache.stride(3),
        metadata.block_table.stride(0),
        NUM_HEADS=num_heads,
        GROUP=num_heads // num_kv_heads,
        GROUP_PADDED=tile.group_padded,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=kv_cache.shape[2],
        TILE_ROWS=tile.rows,
        TILE_KV=tile.kv,
        SINGLE_TOKEN=tile.single_token,
        SPLIT=num_splits > 1,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if num_splits > 1:
        num_rows = num_tokens * num_heads
        merge_kernel[(num_rows,)](
            partial,
            log_sums,
            out,
            num_splits,
            num_rows,
            HEAD_DIM=head_dim,
            MAX_PARTS=MAX_SPLITS,
            num_warps=2,
        )
    return out
