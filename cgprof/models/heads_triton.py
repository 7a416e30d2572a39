"""Norm and rotation of the heads, and keys and values to their slots, in one launch.

One program works on whole heads with a fixed tile, so that a head never depends on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_HEADS_PER_PROGRAM = 4


@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def _norm_rotate_store_kernel(
    heads,  # [T, H + 2 G, C], the query heads are overwritten
    positions,  # [T]
    rope_table,  # [positions, C]
    weights,  # [2, C]
    kv_cache,  # [blocks, 2, S, G, C]
    slot_mapping,  # [T]
    eps,
    stride_block,
    stride_kv,
    stride_slot,
    NORM: tl.constexpr,
    NUM_QUERY: tl.constexpr,
    NUM_KV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    kind = heads.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_HALF)
    inside = column < HALF
    wanted = (head < NUM_QUERY + 2 * NUM_KV)[:, None] & inside[None, :]
    rotated = (head < NUM_QUERY + NUM_KV)[:, None]
    at = heads + (token * (NUM_QUERY + 2 * NUM_KV) + head)[:, None] * (2 * HALF) + column[None, :]
    raw_first = tl.load(at, mask=wanted, other=0.0)
    raw_second = tl.load(at + HALF, mask=wanted, other=0.0)
    first = raw_first.to(tl.float32)
    second = raw_second.to(tl.float32)
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = (1.0 / tl.sqrt(squares / (2 * HALF) + eps))[:, None]
        row = (head >= NUM_QUERY).to(tl.int32)[:, None] * (2 * HALF)
        w_at = weights + row + column[None, :]
        w_first = tl.load(w_at, mask=wanted & rotated, other=0.0).to(tl.float32)
        w_second = tl.load(w_at + HALF, mask=wanted & rotated, other=0.0).to(tl.float32)
        first = ((first * scale).to(kind).to(tl.float32) * w_first).to(kind).to(tl.float32)
        second = ((second * scale).to(kind).to(tl.float32) * w_second).to(kind).to(tl.float32)
    table_at = rope_table + tl.load(positions + token) * (2 * HALF) + column
    cos = tl.load(table_at, mask=inside, other=0.0)[None, :]
    sin = tl.load(table_at + HALF, mask=inside, other=0.0)[None, :]
    new_first = tl.where(rotated, (first * cos - second * sin).to(kind), raw_first)
    new_second = tl.where(rotated, (second * cos + first * sin).to(kind), raw_second)

    is_query = (head < NUM_QUERY)[:, None]
    tl.store(at, new_first, mask=wanted & is_query)
    tl.store(at + HALF, new_second, mask=wanted & is_query)
    slot = tl.load(slot_mapping + token)
    kv_head = tl.maximum(head - NUM_QUERY, 0)
    plane = kv_head // NUM_KV
    into = kv_cache + (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_slot
    into += (plane * stride_kv + (kv_head - plane * NUM_KV) * (2 * HALF))[:, None] + column[None, :]
    kept = wanted & (head >= NUM_QUERY)[:, None] & (slot >= 0)
    tl.store(into, new_first, mask=kept)
    tl.store(into + HALF, new_second, mask=kept)


def norm_rotate_store(
    heads: torch.Tensor,
    positions: torch.Tensor,
    rope_table: torch.Tensor,
    weights: torch.Tensor | None,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    eps: float,
) -> None:
    """Norms and rotates query and key heads; queries stay in place, keys and values are stored.

    Args:
        heads: [T, H + 2 G, C], contiguous; its key and value heads stay as they were.
        positions: [T].
        rope_table: [positions, C] f32, cosines then sines.
        weights: [2, C] of query and key norms, or None for no norm.
        kv_cache: One layer [blocks, 2, S, G, C].
        slot_mapping: [T] block * S + offset; -1 writes nothing.
        eps: Of the norms.
    """
    num_tokens, num_heads, head_dim = heads.shape
    num_kv_heads = kv_cache.shape[3]
    assert kv_cache.stride()[3:] == (head_dim, 1)
    _norm_rotate_store_kernel[(num_tokens, triton.cdiv(num_heads, _HEADS_PER_PROGRAM))](
        heads,
        positions,
        rope_table,
        heads if weights is None else weights,
        kv_cache,
        slot_mapping,
        eps,
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        NORM=weights is not None,
        NUM_QUERY=num_heads - 2 * num_kv_heads,
        NUM_KV=num_kv_heads,
        BLOCK_SIZE=kv_cache.shape[2],
        HALF=head_dim // 2,
        BLOCK_H=_HEADS_PER_PROGRAM,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=1,
    )
