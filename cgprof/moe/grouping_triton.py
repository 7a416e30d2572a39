"""Groups (token, k) rows by expert on the device, in one launch, into blocks of a fixed height."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_SCAN = 1024  # rows read at a time


def max_blocks(num_rows: int, num_experts: int, block_rows: int) -> int:
    """Returns how many blocks any split of `num_rows` rows over the experts can need."""
    busy = min(num_rows, num_experts)
    return (num_rows + busy * (block_rows - 1)) // block_rows


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def _group_kernel(
    expert_ids,  # [T * K]
    block_rows,  # [blocks, BLOCK_M]: rows of a block, `num_rows` where there is none
    block_experts,  # [blocks]: the expert of a block, -1 past the last
    num_rows,
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SCAN: tl.constexpr,
):
    expert = tl.program_id(0)
    counts = tl.zeros([BINS], tl.int32)
    start = 0
    while start < num_rows:
        at = start + tl.arange(0, SCAN)
        ids = tl.load(expert_ids + at, mask=at < num_rows, other=-1)
        counts += tl.histogram(ids, BINS, mask=(ids >= 0) & (ids < NUM_EXPERTS))
        start += SCAN
    bins = tl.arange(0, BINS)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(bins < expert, blocks, 0))
    own_blocks = tl.sum(tl.where(bins == expert, blocks, 0))
    own_rows = tl.sum(tl.where(bins == expert, counts, 0))

    done = 0
    while done < own_blocks:
        at = done + tl.arange(0, 128)
        tl.store(block_experts + first + at, expert, mask=at < own_blocks)
        done += 128
    if expert == 0:
        done = tl.sum(blocks)
        while done < num_blocks:
            at = done + tl.arange(0, 128)
            tl.store(block_experts + at, -1, mask=at < num_blocks)
            done += 128

    own = block_rows + first * BLOCK_M
    tail = own_rows + tl.arange(0, BLOCK_M)
    tl.store(own + tail, num_rows, mask=tail < own_blocks * BLOCK_M)
    placed = 0
    start = 0
    while start < num_rows:
        at = start + tl.arange(0, SCAN)
        mine = tl.load(expert_ids + at, mask=at < num_rows, other=-1) == expert
        rank = placed + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(own + rank, at, mask=mine)
        placed += tl.sum(mine.to(tl.int32))
        start += SCAN


def group_rows(
    expert_ids: torch.Tensor, num_experts: int, block_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each block's rows [blocks, block_rows] and expert [blocks] i32, rows in order.

    A row is `token * K + k`; a place without a row holds T * K. Blocks past the last have
    expert -1 and no rows.
    """
    num_rows = expert_ids.numel()
    num_blocks = max_blocks(num_rows, num_experts, block_rows)
    rows = torch.empty(num_blocks, block_rows, dtype=torch.int32, device=expert_ids.device)
    experts = torch.empty(num_blocks, dtype=torch.int32, device=expert_ids.device)
    _group_kernel[(num_experts,)](
        expert_ids,
        rows,
        experts,
        num_rows,
        num_blocks,
        NUM_EXPERTS=num_experts,
        BINS=max(128, triton.next_power_of_2(num_experts)),
        BLOCK_M=block_rows,
        SCAN=_SCAN,
        num_warps=4,
    )
    return rows, experts
