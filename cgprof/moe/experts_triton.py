"""The experts on the GPU in four launches: group rows by expert, gate and up, down, sum over K.

Every size that the host needs follows from shapes alone; blocks beyond the real count end at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cgprof.moe.grouping_triton import group_rows
from cgprof.moe.tiles import choose_tiles

_SUM_COLUMNS = 1024


@triton.jit(do_not_specialize=["num_rows"])
def _gate_up_kernel(
    hidden,  # [T, D]
    weight,  # [L, 2F, D]
    block_rows,
    block_experts,
    activated,  # [T * K, F]
    num_rows,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    FFN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    block = tl.program_id(1)
    expert = tl.load(block_experts + block)
    if expert < 0:
        return
    rows = tl.load(block_rows + block * BLOCK_M + tl.arange(0, BLOCK_M))
    real = (rows < num_rows)[:, None]
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    wanted = (columns < FFN)[None, :]
    depth = tl.arange(0, BLOCK_K)
    x_at = hidden + (rows // TOP_K).to(tl.int64)[:, None] * HIDDEN + depth[None, :]
    gate_at = (
        weight
        + expert.to(tl.int64) * (2 * FFN * HIDDEN)
        + columns[None, :] * HIDDEN
        + depth[:, None]
    )
    up_at = gate_at + FFN * HIDDEN
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, HIDDEN, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_at + start, mask=real, other=0.0)
            w_gate = tl.load(gate_at + start, mask=wanted, other=0.0)
            w_up = tl.load(up_at + start, mask=wanted, other=0.0)
        else:
            inside = depth < HIDDEN - start
            x = tl.load(x_at + start, mask=real & inside[None, :], other=0.0)
            w_gate = tl.load(gate_at + start, mask=wanted & inside[:, None], other=0.0)
            w_up = tl.load(up_at + start, mask=wanted & inside[:, None], other=0.0)
        gate = tl.dot(x, w_gate, gate, input_precision="ieee")
        up = tl.dot(x, w_up, up, input_precision="ieee")
    value = gate * tl.sigmoid(gate) * up
    out_at = activated + rows.to(tl.int64)[:, None] * FFN + columns[None, :]
    tl.store(out_at, value.to(activated.dtype.element_ty), mask=real & wanted)


@triton.jit(do_not_specialize=["num_rows"])
def _down_kernel(
    activated,  # [T * K, F]
    weight,  # [L, D, F]
    routing,  # [T * K]
    block_rows,
    block_experts,
    parts,  # [T * K, D]
    num_rows,
    HIDDEN: tl.constexpr,
    FFN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    block = tl.program_id(1)
    expert = tl.load(block_experts + block)
    if expert < 0:
        return
    rows = tl.load(block_rows + block * BLOCK_M + tl.arange(0, BLOCK_M))
    inside_rows = rows < num_rows
    real = inside_rows[:, None]
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    wanted = (columns < HIDDEN)[None, :]
    depth = tl.arange(0, BLOCK_K)
    x_at = activated + rows.to(tl.int64)[:, None] * FFN + depth[None, :]
    w_at = weight + expert.to(tl.int64) * (HIDDEN * FFN) + columns[None, :] * FFN + depth[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, FFN, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_at + start, mask=real, other=0.0)
            w = tl.load(w_at + start, mask=wanted, other=0.0)
        else:
            inside = depth < FFN - start
            x = tl.load(x_at + start, mask=real & inside[None, :], other=0.0)
            w = tl.load(w_at + start, mask=wanted & inside[:, None], other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
    share = tl.load(routing + rows, mask=inside_rows, other=0.0)
    out_at = parts + rows.to(tl.int64)[:, None] * HIDDEN + columns[None, :]
    tl.store(out_at, (total * share[:, None]).to(parts.dtype.element_ty), mask=real & wanted)


@triton.jit
def _sum_kernel(
    parts,  # [T, K, D]
    expert_ids,  # [T, K]
    sums,  # [T, D]
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    wanted = columns < HIDDEN
    total = tl.zeros([BLOCK_N], tl.float32)
    for k in tl.static_range(TOP_K):
        row = token * TOP_K + k
        expert = tl.load(expert_ids + row)
        written = (expert >= 0) & (expert < NUM_EXPERTS)
        part = tl.load(
            parts + row.to(tl.int64) * HIDDEN + columns, mask=wanted & written, other=0.0
        )
        total += part.to(tl.float32)
    at = sums + token.to(tl.int64) * HIDDEN + columns
    tl.store(at, total.to(sums.dtype.element_ty), mask=wanted)


def run_experts(
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    batch_invariant: bool,
    total_experts: int | None = None,
) -> torch.Tensor:
    """Returns the weighted sums [T, D]; each row's arithmetic depends on its tile sizes alone.

    Args:
        hidden: [T, D], contiguous like all the others.
        expert_ids: [T, K] i32; ids outside 0 .. L - 1 add zero.
        weights: [T, K] f32.
        gate_up: [L, 2F, D].
        down: [L, D, F].
        batch_invariant: One set of tiles for every T.
        total_experts: Experts of all ranks, over which ids are spread; None: L.
    """
    num_tokens, top_k = expert_ids.shape
    num_experts, hidden_size, ffn_size = down.shape
    num_rows = num_tokens * top_k
    own_rows = num_rows * num_experts // (total_experts or num_experts)
    tiles = choose_tiles(own_rows, num_experts, hidden.dtype, batch_invariant=batch_invariant)
    block_rows, block_experts = group_rows(expert_ids, num_experts, tiles.rows)
    num_blocks = block_experts.shape[0]
    activated = hidden.new_empty(num_rows, ffn_size)
    parts = hidden.new_empty(num_rows, hidden_size)
    sums = torch.empty_like(hidden)
    tile = tiles.gate_up
    # A block's columns run side by side, so that its rows are read from memory once.
    _gate_up_kernel[(triton.cdiv(ffn_size, tile.columns), num_blocks)](
        hidden,
        gate_up,
        block_rows,
        block_experts,
        activated,
        num_rows,
        TOP_K=top_k,
        HIDDEN=hidden_size,
        FFN=ffn_size,
        BLOCK_M=tiles.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        EVEN_K=hidden_size % tile.depth == 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    tile = tiles.down
    _down_kernel[(triton.cdiv(hidden_size, tile.columns), num_blocks)](
        activated,
        down,
        weights,
        block_rows,
        block_experts,
        parts,
        num_rows,
        HIDDEN=hidden_size,
        FFN=ffn_size,
        BLOCK_M=tiles.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        EVEN_K=ffn_size % tile.depth == 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    _sum_kernel[(num_tokens, triton.cdiv(hidden_size, _SUM_COLUMNS))](
        parts,
        expert_ids,
        sums,
        TOP_K=top_k,
        HIDDEN=hidden_size,
        NUM_EXPERTS=num_experts,
        BLOCK_N=_SUM_COLUMNS,
        num_warps=4,
    )
    return sums
