"""Packs tokens into one block a rank and adds up what comes back; plain torch, and the oracle.

A block is [capacity + tail, D]: hidden states, then the ids and weights of all of them in the
bytes of the tail. Tail rows go through the experts' rank as rows without an expert.
"""

from __future__ import annotations

import torch

from cgprof.moe.block_layout import BlockLayout


def pack(
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    blocks: torch.Tensor,
    dropped: torch.Tensor,
    layout: BlockLayout,
) -> torch.Tensor:
    """Fills the blocks with each rank's tokens in order and returns their places [P, T] i32.

    A place is the row in the rank's block, -1 where the rank gets no such token. Tokens beyond the
    capacity are added to `dropped`. Places of a block that stay free get ids -1.

    Args:
        hidden: [T, D].
        expert_ids: [T, K] i32.
        weights: [T, K] f32.
        starts: [P + 1] i32, rank p has experts starts[p] .. starts[p + 1] - 1.
        blocks: [rows + 1, D]; the last row takes what is sent nowhere.
        dropped: [1] i64.
        layout: How the blocks lie.
    """
    if hidden.is_cuda:
        from cgprof.moe.packing_triton import pack_blocks

        return pack_blocks(hidden, expert_ids, weights, starts, blocks, dropped, layout)
    return pack_plain(hidden, expert_ids, weights, starts, blocks, dropped, layout)


def unpack(
    blocks: torch.Tensor, own: range, layout: BlockLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns local expert ids [rows, K] i32, -1 where not in `own`, and weights [rows, K] f32.

    Args:
        blocks: [rows, D], one received from each rank.
        own: This rank's experts.
        layout: How the blocks lie.
    """
    if blocks.is_cuda:
        from cgprof.moe.packing_triton import unpack_routing

        return unpack_routing(blocks, own, layout)
    return unpack_plain(blocks, own, layout)


def bring_home(blocks: torch.Tensor, places: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """Returns each token's sum [T, D] over the rows that came back, in rank order and f32.

    Args:
        blocks: [rows, D], one returned by each rank.
        places: [P, T] i32, from `pack`.
        layout: How the blocks lie.
    """
    if blocks.is_cuda:
        from cgprof.moe.packing_triton import sum_blocks

        return sum_blocks(blocks, places, layout)
    return bring_home_plain(blocks, places, layout)


def pack_plain(
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    blocks: torch.Tensor,
    dropped: torch.Tensor,
    layout: BlockLayout,
) -> torch.Tensor:
    """The packing of `pack` in plain torch."""
    num_ranks, capacity, rows = layout.num_ranks, layout.capacity, layout.rows
    wanted = (expert_ids >= starts[:-1, None, None]) & (expert_ids < starts[1:, None, None])
    wanted = wanted.any(dim=2)  # [P, T]
    places = wanted.cumsum(dim=1) - 1
    fits = places < capacity
    dropped += (wanted & ~fits).sum()
    places = torch.where(wanted & fits, places, -1)

    ranks = torch.arange(num_ranks, device=hidden.device)[:, None]
    nowhere = places < 0
    targets = (places + ranks * layout.block_rows).masked_fill(nowhere, rows)
    blocks.index_copy_(0, targets.flatten(), hidden.repeat(num_ranks, 1))
    routing = torch.cat((expert_ids, weights.view(torch.int32)), dim=1)
    sent = routing.new_full((num_ranks * capacity + 1, routing.shape[1]), -1)
    targets = (places + ranks * capacity).masked_fill(nowhere, num_ranks * capacity)
    sent.index_copy_(0, targets.flatten(), routing.repeat(num_ranks, 1))
    layout.routing(blocks[:rows]).copy_(sent[:-1].view(num_ranks, capacity, -1))
    return places.to(torch.int32)


def unpack_plain(
    blocks: torch.Tensor, own: range, layout: BlockLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """The unpacking of `unpack` in plain torch."""
    top_k = layout.row.top_k
    shape = (layout.num_ranks, layout.block_rows, top_k)
    local = torch.full(shape, -1, dtype=torch.int32, device=blocks.device)
    weights = torch.zeros(shape, dtype=torch.float32, device=blocks.device)
    ids, bits = layout.routing(blocks).split(top_k, dim=2)
    is_own = (ids >= own.start) & (ids < own.stop)
    local[:, : layout.capacity] = torch.where(is_own, ids - own.start, -1)
    weights[:, : layout.capacity] = bits.contiguous().view(torch.float32)
    return local.view(-1, top_k), weights.view(-1, top_k)


def bring_home_plain(
    blocks: torch.Tensor, places: torch.Tensor, layout: BlockLayout
) -> torch.Tensor:
    """The sum of `bring_home` in plain torch."""
    total = torch.zeros(places.shape[1], blocks.shape[1], device=blocks.device)
    for block, rows in zip(
        blocks.view(layout.num_ranks, layout.block_rows, -1), places, strict=True
    ):
        parts = block.index_select(0, rows.clamp(min=0)).to(torch.float32)
        total += parts.masked_fill((rows < 0)[:, None], 0.0)
    return total.to(blocks.dtype)
