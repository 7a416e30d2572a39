"""Kernels that write rows into peers' memory, and those that wait until peers have written theirs.

Of a kernel that writes, the block that ends last adds one to a flag at every rank. Its ticket and
that add have system scope: who acquires the flag sees what all blocks wrote. A wait is one block
of one warp. It cannot keep a writer from the device, and it never asks the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cgprof.moe.block_layout import BlockLayout
from cgprof.moe.symmetric_memory import Half

# Of a kernel that writes, so that compute keeps most of the device: a block for each SM of an H200.
MOST_BLOCKS = 132
_TILE_ELEMENTS = 8192
_COLUMNS = 4096
_MOST_ROWS = 4  # of a tile, where there are more rows than blocks


@triton.jit
def _signal(ticket, flags, NUM_RANKS: tl.constexpr, BLOCK_P: tl.constexpr):
    tl.debug_barrier()  # all threads of the block have written
    done = tl.atomic_add(ticket, 1, sem="acq_rel", scope="sys")
    if done == tl.num_programs(0) - 1:
        tl.store(ticket, 0)
        rank = tl.arange(0, BLOCK_P)
        is_rank = rank < NUM_RANKS
        flag = tl.load(flags + rank, mask=is_rank, other=0).to(tl.pointer_type(tl.int64))
        one = tl.full([BLOCK_P], 1, tl.int64)
        tl.atomic_add(flag, one, mask=is_rank, sem="release", scope="sys")


@triton.jit(do_not_specialize=["num_tokens", "first_row", "capacity", "tail_rows"])
def _peer_send_kernel(
    hidden,  # [T, D]
    places,  # [P, T]
    tails,  # [P * tail_rows, D]
    blocks,  # [P] i64, addresses of the ranks' matrices [rows, D]
    flags,  # [P] i64, addresses of this rank's flag at every rank
    ticket,  # [1] i32
    num_tokens,
    first_row,  # of this rank's block
    capacity,
    tail_rows,
    NUM_RANKS: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    start = tl.program_id(0) * ROWS
    stride = tl.num_programs(0) * ROWS
    first = start
    while first < num_tokens:
        token = first + tl.arange(0, ROWS)
        inside = token < num_tokens
        source = hidden + token[:, None].to(tl.int64) * HIDDEN
        for begin in tl.static_range(0, HIDDEN, BLOCK_N):
            column = begin + tl.arange(0, BLOCK_N)[None, :]
            wanted = column < HIDDEN
            rows = tl.load(source + column, mask=inside[:, None] & wanted)
            for rank in tl.static_range(NUM_RANKS):
                place = tl.load(places + rank * num_tokens + token, mask=inside, other=-1)
                base = tl.load(blocks + rank)
                block = tl.multiple_of(base.to(tl.pointer_type(hidden.dtype.element_ty)), [16])
                at = block + (first_row + place)[:, None].to(tl.int64) * HIDDEN + column
                tl.store(at, rows, mask=(place >= 0)[:, None] & wanted)
        first += stride
    first = start
    while first < NUM_RANKS * tail_rows:
        row = first + tl.arange(0, ROWS)
        inside = row < NUM_RANKS * tail_rows
        source = tails + row[:, None].to(tl.int64) * HIDDEN
        base = tl.load(blocks + row // tail_rows, mask=inside, other=0)
        block = tl.multiple_of(base.to(tl.pointer_type(hidden.dtype.element_ty)), [16])
        target = (first_row + capacity + row % tail_rows)[:, None].to(tl.int64) * HIDDEN
        for begin in tl.static_range(0, HIDDEN, BLOCK_N):
            column = begin + tl.arange(0, BLOCK_N)[None, :]
            wanted = inside[:, None] & (column < HIDDEN)
            words = tl.load(source + column, mask=wanted)
            tl.store(block[:, None] + target + column, words, mask=wanted)
        first += stride
    _signal(ticket, flags, NUM_RANKS, BLOCK_P)


@triton.jit(do_not_specialize=["num_rows", "first_row", "block_rows"])
def _peer_return_kernel(
    sums,  # [rows, D]
    expert_ids,  # [rows, K]
    blocks,  # [P] i64, addresses of the ranks' matrices [rows, D]
    flags,  # [P] i64, addresses of this rank's flag at every rank
    ticket,  # [1] i32
    num_rows,
    first_row,  # of this rank's block
    block_rows,
    NUM_RANKS: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    k = tl.arange(0, BLOCK_K)[None, :]
    while first < num_rows:
        row = first + tl.arange(0, ROWS)
        inside = row < num_rows
        at = expert_ids + row[:, None] * TOP_K + k
        ids = tl.load(at, mask=inside[:, None] & (k < TOP_K), other=-1)
        real = tl.max(ids, 1) >= 0  # someone's token; the others are never read
        source = sums + row[:, None].to(tl.int64) * HIDDEN
        base = tl.load(blocks + row // block_rows, mask=inside, other=0)
        block = tl.multiple_of(base.to(tl.pointer_type(sums.dtype.element_ty)), [16])
        target = (first_row + row % block_rows)[:, None].to(tl.int64) * HIDDEN
        for begin in tl.static_range(0, HIDDEN, BLOCK_N):
            column = begin + tl.arange(0, BLOCK_N)[None, :]
            wanted = real[:, None] & (column < HIDDEN)
            tl.store(
                block[:, None] + target + column,
                tl.load(source + column, mask=wanted),
                mask=wanted,
            )
        first += tl.num_programs(0) * ROWS
    _signal(ticket, flags, NUM_RANKS, BLOCK_P)


@triton.jit
def _peer_wait_kernel(
    flags,  # [P] i64, of this rank, one a peer that signals
    waited,  # [1] i64, the exchanges waited for so far
    NUM_RANKS: tl.constexpr,
):
    wanted = tl.load(waited) + 1
    for rank in tl.static_range(NUM_RANKS):
        while tl.atomic_add(flags + rank, 0, sem="acquire", scope="sys") < wanted:
            pass
    tl.store(waited, wanted)


def send_tokens(
    hidden: torch.Tensor,
    places: torch.Tensor,
    tails: torch.Tensor,
    half: Half,
    rank: int,
    layout: BlockLayout,
) -> None:
    """Writes each token into the blocks of the ranks that want it, the tails too, and signals.

    Args:
        hidden: [T, D].
        places: [P, T] i32, from `place_tokens`.
        tails: [P * tail_rows, D], likewise.
        half: Where the ranks receive tokens.
        rank: This rank.
        layout: How the blocks lie.
    """
    num_tokens, hidden_size = hidden.shape
    rows, columns = _tile(num_tokens, hidden_size)
    most = max(num_tokens, tails.shape[0])
    _peer_send_kernel[(min(triton.cdiv(most, rows), MOST_BLOCKS),)](
        hidden,
        places,
        tails,
        half.blocks_at,
        half.flags_at,
        half.ticket,
        num_tokens,
        rank * layout.block_rows,
        layout.capacity,
        layout.tail_rows,
        NUM_RANKS=layout.num_ranks,
        HIDDEN=hidden_size,
        ROWS=rows,
        BLOCK_N=columns,
        BLOCK_P=triton.next_power_of_2(layout.num_ranks),
        num_warps=8,
    )


def return_sums(
    sums: torch.Tensor,
    expert_ids: torch.Tensor,
    half: Half,
    rank: int,
    layout: BlockLayout,
) -> None:
    """Writes each row that has an expert here back to where its token came from, and signals.

    Args:
        sums: [rows, D], one block for each rank.
        expert_ids: [rows, K] i32, local, from `unpack`.
        half: Where the ranks receive sums.
        rank: This rank.
        layout: How the blocks lie.
    """
    num_rows, hidden_size = sums.shape
    rows, columns = _tile(num_rows, hidden_size)
    top_k = layout.row.top_k
    _peer_return_kernel[(min(triton.cdiv(num_rows, rows), MOST_BLOCKS),)](
        sums,
        expert_ids,
        half.blocks_at,
        half.flags_at,
        half.ticket,
        num_rows,
        rank * layout.block_rows,
        layout.block_rows,
        NUM_RANKS=layout.num_ranks,
        HIDDEN=hidden_size,
        TOP_K=top_k,
        BLOCK_K=triton.next_power_of_2(top_k),
        ROWS=rows,
        BLOCK_N=columns,
        BLOCK_P=triton.next_power_of_2(layout.num_ranks),
        num_warps=8,
    )


def wait_for_peers(half: Half) -> None:
    """Waits on the device until every rank has signalled once more."""
    _peer_wait_kernel[(1,)](half.flags, half.waited, NUM_RANKS=half.flags.shape[0], num_warps=1)


def _tile(num_rows: int, hidden_size: int) -> tuple[int, int]:
    """Rows and columns of a tile: one row as long as each has a block of its own."""
    columns = min(_COLUMNS, triton.next_power_of_2(hidden_size))
    rows = 1 if num_rows <= MOST_BLOCKS else min(_MOST_ROWS, max(1, _TILE_ELEMENTS // columns))
    return rows, columns
