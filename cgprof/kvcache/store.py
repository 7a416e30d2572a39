"""Writes keys and values to their slots in plain torch, recordable on a tape."""

from __future__ import annotations

import torch


def store_kv(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Writes each token's key and value; slot -1 changes nothing.

    Args:
        key: [T, G, C].
        value: [T, G, C].
        kv_cache: One layer, contiguous [blocks, 2, S, G, C].
        slot_mapping: [T] block * S + offset, or -1.
    """
    block_size = kv_cache.shape[2]
    width = kv_cache.shape[3] * kv_cache.shape[4]
    rows = kv_cache.view(-1, width)  # [blocks * 2 * S, G * C]
    # A slot of -1 rewrites what slot 0 of block 0 holds: no live value can be lost there.
    slots = slot_mapping.clamp(min=0)
    key_rows = slots + slots.div(block_size, rounding_mode="floor") * block_size
    keep = (slot_mapping < 0).unsqueeze(1)
    for index, new in ((key_rows, key), (key_rows + block_size, value)):
        old = rows.index_select(0, index)
        rows.index_copy_(0, index, torch.where(keep, old, new.reshape(-1, width)))
