"""Writes keys and values to their slots with one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def store_kernel(
    key,
    value,
    kv_cache,
    slot_mapping,
    stride_key,
    stride_value,
    stride_block,
    stride_kv,
    stride_slot,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
):
    """One program a token; `WIDTH` is G * C, contiguous in all three tensors."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    columns = tl.arange(0, WIDTH_PADDED)
    inside = columns < WIDTH
    target = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_slot + columns
    new_key = tl.load(key + token * stride_key + columns, mask=inside)
    new_value = tl.load(value + token * stride_value + columns, mask=inside)
    tl.store(kv_cache + target, new_key, mask=inside)
    tl.store(kv_cache + target + stride_kv, new_value, mask=inside)


def store_kv(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Writes each token's key and value; slot -1 writes nothing.

    Args:
        key: [T, G, C], each token's G * C contiguous.
        value: [T, G, C], each token's G * C contiguous.
        kv_cache: One layer [blocks, 2, S, G, C].
        slot_mapping: [T] block * S + offset, or -1.
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    width = num_kv_heads * head_dim
    assert key.stride()[1:] == value.stride()[1:] == kv_cache.stride()[3:] == (head_dim, 1)
    store_kernel[(num_tokens,)](
        key,
        value,
        kv_cache,
        slot_mapping,
        key.stride(0),
        value.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        BLOCK_SIZE=kv_cache.shape[2],
        WIDTH=width,
        WIDTH_PADDED=triton.next_power_of_2(width),
        num_warps=1 if width <= 256 else 4,
    )
