"""The packing of `cgprof.moe.packing` on the GPU: two launches to send, one at each other end."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cgprof.moe.block_layout import BlockLayout

_COLUMNS = 1024
_SCAN_ELEMENTS = 2048  # ids that a rank's scan reads at a time
_UNPACKED = 256


@triton.jit(do_not_specialize=["num_tokens", "capacity", "block_words", "routing_word"])
def _place_kernel(
    expert_ids,  # [T, K]
    weights,  # [T, K]
    starts,  # [P + 1]
    places,  # [P, T]
    words,  # blocks as i32, one a rank; a block's routing begins at its routing_word
    dropped,  # [1]
    num_tokens,
    capacity,
    block_words,
    routing_word,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCAN: tl.constexpr,
):
    rank = tl.program_id(0)
    first = tl.load(starts + rank)
    past = tl.load(starts + rank + 1)
    routing = words + rank.to(tl.int64) * block_words + routing_word
    k = tl.arange(0, BLOCK_K)[None, :]
    placed = 0
    start = 0
    while start < num_tokens:
        token = start + tl.arange(0, SCAN)
        inside = token < num_tokens
        at = token[:, None] * TOP_K + k
        real = inside[:, None] & (k < TOP_K)
        ids = tl.load(expert_ids + at, mask=real, other=-1)
        mine = tl.max(((ids >= first) & (ids < past)).to(tl.int32), 1)
        place = placed + tl.cumsum(mine, 0) - 1
        sent = (mine > 0) & (place < capacity)
        tl.store(places + rank * num_tokens + token, tl.where(sent, place, -1), mask=inside)
        out = routing + place[:, None] * (2 * TOP_K) + k
        kept = sent[:, None] & (k < TOP_K)
        tl.store(out, ids, mask=kept)
        share = tl.load(weights + at, mask=kept, other=0.0)
        tl.store(out + TOP_K, share.to(tl.int32, bitcast=True), mask=kept)
        placed += tl.sum(mine)
        start += SCAN
    if placed > capacity:
        tl.atomic_add(dropped, (placed - capacity).to(tl.int64))
    free = placed
    while free < capacity:
        place = free + tl.arange(0, SCAN)
        out = routing + place[:, None] * (2 * TOP_K) + k
        tl.store(out, -1, mask=(place < capacity)[:, None] & (k < TOP_K))
        free += SCAN


@triton.jit(do_not_specialize=["num_tokens", "block_rows"])
def _send_kernel(
    hidden,  # [T, D]
    places,  # [P, T]
    blocks,  # [rows, D]
    num_tokens,
    block_rows,
    NUM_RANKS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    wanted = columns < HIDDEN
    row = tl.load(hidden + token.to(tl.int64) * HIDDEN + columns, mask=wanted)
    for rank in tl.static_range(NUM_RANKS):
        place = tl.load(places + rank * num_tokens + token)
        at = blocks + (rank * block_rows + place).to(tl.int64) * HIDDEN + columns
        tl.store(at, row, mask=wanted & (place >= 0))


@triton.jit(do_not_specialize=["num_elements", "capacity", "block_rows", "first", "past"])
def _unpack_kernel(
    words,  # the blocks as i32
    local_ids,  # [rows, K]
    weights,  # [rows, K]
    num_elements,
    capacity,
    block_rows,
    first,
    past,
    ROW_WORDS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = element // TOP_K
    place = row % block_rows
    inside = element < num_elements
    is_hidden = inside & (place < capacity)
    routing = (row - place + capacity).to(tl.int64) * ROW_WORDS
    at = words + routing + place * (2 * TOP_K) + element % TOP_K
    ids = tl.load(at, mask=is_hidden, other=-1)
    share = tl.load(at + TOP_K, mask=is_hidden, other=0).to(tl.float32, bitcast=True)
    own = (ids >= first) & (ids < past)
    tl.store(local_ids + element, tl.where(own, ids - first, -1), mask=inside)
    tl.store(weights + element, share, mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "block_rows"])
def _home_kernel(
    blocks,  # [rows, D]
    places,  # [P, T]
    sums,  # [T, D]
    num_tokens,
    block_rows,
    NUM_RANKS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    wanted = columns < HIDDEN
    total = tl.zeros([BLOCK_N], tl.float32)
    for rank in tl.static_range(NUM_RANKS):
        place = tl.load(places + rank * num_tokens + token)
        at = blocks + (rank * block_rows + place).to(tl.int64) * HIDDEN + columns
        total += tl.load(at, mask=wanted & (place >= 0), other=0.0).to(tl.float32)
    at = sums + token.to(tl.int64) * HIDDEN + columns
    tl.store(at, total.to(sums.dtype.element_ty), mask=wanted)


def pack_blocks(
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    blocks: torch.Tensor,
    dropped: torch.Tensor,
    layout: BlockLayout,
) -> torch.Tensor:
    """Fills the blocks and returns the places [P, T] i32; arguments as of `packing.pack`."""
    num_tokens, hidden_size = hidden.shape
    routing_row = layout.capacity
    places = _place(
        expert_ids, weights, starts, blocks, layout.block_rows, routing_row, dropped, layout
    )
    columns = min(_COLUMNS, triton.next_power_of_2(hidden_size))
    _send_kernel[(num_tokens, triton.cdiv(hidden_size, columns))](
        hidden,
        places,
        blocks,
        num_tokens,
        layout.block_rows,
        NUM_RANKS=layout.num_ranks,
        HIDDEN=hidden_size,
        BLOCK_N=columns,
        num_warps=4,
    )
    return places


def place_tokens(
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    tails: torch.Tensor,
    dropped: torch.Tensor,
    layout: BlockLayout,
) -> torch.Tensor:
    """Fills the blocks' tails [P * tail_rows, D] alone and returns the places [P, T] i32.

    Other arguments as of `packing.pack`.
    """
    return _place(expert_ids, weights, starts, tails, layout.tail_rows, 0, dropped, layout)


def unpack_routing(
    blocks: torch.Tensor, own: range, layout: BlockLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns local expert ids and weights [rows, K]; arguments as of `packing.unpack`."""
    top_k = layout.row.top_k
    local_ids = torch.empty(layout.rows, top_k, dtype=torch.int32, device=blocks.device)
    weights = torch.empty(layout.rows, top_k, dtype=torch.float32, device=blocks.device)
    count = local_ids.numel()
    _unpack_kernel[(triton.cdiv(count, _UNPACKED),)](
        blocks.view(torch.int32),
        local_ids,
        weights,
        count,
        layout.capacity,
        layout.block_rows,
        own.start,
        own.stop,
        ROW_WORDS=layout.row.hidden_bytes // 4,
        TOP_K=top_k,
        BLOCK=_UNPACKED,
        num_warps=4,
    )
    return local_ids, weights


def sum_blocks(blocks: torch.Tensor, places: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """Returns each token's sum [T, D]; arguments as of `packing.bring_home`."""
    num_tokens, hidden_size = places.shape[1], blocks.shape[1]
    sums = blocks.new_empty(num_tokens, hidden_size)
    columns = min(_COLUMNS, triton.next_power_of_2(hidden_size))
    _home_kernel[(num_tokens, triton.cdiv(hidden_size, columns))](
        blocks,
        places,
        sums,
        num_tokens,
        layout.block_rows,
        NUM_RANKS=layout.num_ranks,
        HIDDEN=hidden_size,
        BLOCK_N=columns,
        num_warps=4,
    )
    return sums


def _place(
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    blocks: torch.Tensor,
    block_rows: int,
    routing_row: int,
    dropped: torch.Tensor,
    layout: BlockLayout,
) -> torch.Tensor:
    """Writes the routing into each block from its routing_row on and returns the places."""
    num_tokens, top_k = expert_ids.shape
    places = torch.empty(layout.num_ranks, num_tokens, dtype=torch.int32, device=expert_ids.device)
    block_k = triton.next_power_of_2(top_k)
    row_words = layout.row.hidden_bytes // 4
    _place_kernel[(layout.num_ranks,)](
        expert_ids,
        weights,
        starts,
        places,
        blocks.view(torch.int32),
        dropped,
        num_tokens,
        layout.capacity,
        block_rows * row_words,
        routing_row * row_words,
        TOP_K=top_k,
        BLOCK_K=block_k,
        SCAN=max(16, _SCAN_ELEMENTS // block_k),
        num_warps=4,
    )
    return places
