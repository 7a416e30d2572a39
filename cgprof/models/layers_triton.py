"""Add and norm, per-head norm and rotation, and SwiGLU, each in one launch.

One program works on whole rows with a fixed tile, so that a row never depends on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_HEADS_PER_PROGRAM = 4
_SWIGLU_COLUMNS = 1024
_ELEMENTS_PER_WARP = 256


@triton.jit
def _add_rms_norm_kernel(
    residual,  # [T, D], overwritten by the sum when ADD
    x,  # [T, D]
    weight,  # [D]
    out,  # [T, D]
    eps,
    ADD: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    wanted = columns < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + columns
    row = tl.load(residual + at, mask=wanted, other=0.0)
    if ADD:
        other = tl.load(x + at, mask=wanted, other=0.0)
        row = (row.to(tl.float32) + other.to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(residual + at, row, mask=wanted)
    wide = row.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    normed = (wide * scale).to(residual.dtype.element_ty).to(tl.float32)
    value = normed * tl.load(weight + columns, mask=wanted, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _qk_norm_rope_kernel(
    heads,  # [T, H + 2 G, C], the first NUM_ROTATED heads are overwritten
    positions,  # [T]
    rope_table,  # [positions, C]
    weights,  # [2, C]
    eps,
    NORM: tl.constexpr,
    NUM_QUERY: tl.constexpr,
    NUM_ROTATED: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_HALF)
    inside = column < HALF
    wanted = (head < NUM_ROTATED)[:, None] & inside[None, :]
    at = heads + (token * NUM_HEADS + head)[:, None] * (2 * HALF) + column[None, :]
    first = tl.load(at, mask=wanted, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=wanted, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        scale = (1.0 / tl.sqrt(squares / (2 * HALF) + eps))[:, None]
        row = (head >= NUM_QUERY).to(tl.int32)[:, None] * (2 * HALF)
        w_at = weights + row + column[None, :]
        w_first = tl.load(w_at, mask=wanted, other=0.0).to(tl.float32)
        w_second = tl.load(w_at + HALF, mask=wanted, other=0.0).to(tl.float32)
        kind = heads.dtype.element_ty
        first = ((first * scale).to(kind).to(tl.float32) * w_first).to(kind).to(tl.float32)
        second = ((second * scale).to(kind).to(tl.float32) * w_second).to(kind).to(tl.float32)
    table_at = rope_table + tl.load(positions + token) * (2 * HALF) + column
    cos = tl.load(table_at, mask=inside, other=0.0)[None, :]
    sin = tl.load(table_at + HALF, mask=inside, other=0.0)[None, :]
    tl.store(at, (first * cos - second * sin).to(heads.dtype.element_ty), mask=wanted)
    tl.store(at + HALF, (second * cos + first * sin).to(heads.dtype.element_ty), mask=wanted)


@triton.jit
def _silu_and_mul_kernel(
    gate_up,  # [T, 2F]
    out,  # [T, F]
    FFN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wanted = columns < FFN
    at = gate_up + token * (2 * FFN) + columns
    gate = tl.load(at, mask=wanted, other=0.0).to(tl.float32)
    up = tl.load(at + FFN, mask=wanted, other=0.0).to(tl.float32)
    active = (gate * tl.sigmoid(gate)).to(gate_up.dtype.element_ty).to(tl.float32)
    tl.store(out + token * FFN + columns, (active * up).to(out.dtype.element_ty), mask=wanted)


def add_rms_norm_fused(
    residual: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """Writes the norm of residual + x [T, D] into `out`, the sum into `residual`; x may be None."""
    num_tokens, size = residual.shape
    block = triton.next_power_of_2(size)
    _add_rms_norm_kernel[(num_tokens,)](
        residual,
        residual if x is None else x,
        weight,
        out,
        eps,
        ADD=x is not None,
        SIZE=size,
        BLOCK=block,
        num_warps=min(16, max(1, block // _ELEMENTS_PER_WARP)),
    )
    return out


def qk_norm_rope_in_place(
    heads: torch.Tensor,
    positions: torch.Tensor,
    rope_table: torch.Tensor,
    weights: torch.Tensor | None,
    num_query_and_rotated: tuple[int, int],
    eps: float,
) -> None:
    """Norms and rotates the query and key heads of heads [T, H + 2 G, C] where they lie.

    Args:
        heads: Contiguous.
        positions: [T].
        rope_table: [positions, C] f32, cosines then sines.
        weights: [2, C] of query and key norms, or None for no norm.
        num_query_and_rotated: H and H + G.
        eps: Of the norms.
    """
    num_tokens, num_heads, head_dim = heads.shape
    num_query, num_rotated = num_query_and_rotated
    _qk_norm_rope_kernel[(num_tokens, triton.cdiv(num_rotated, _HEADS_PER_PROGRAM))](
        heads,
        positions,
        rope_table,
        heads if weights is None else weights,
        eps,
        NORM=weights is not None,
        NUM_QUERY=num_query,
        NUM_ROTATED=num_rotated,
        NUM_HEADS=num_heads,
        HALF=head_dim // 2,
        BLOCK_H=_HEADS_PER_PROGRAM,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=1,
    )


def silu_and_mul_fused(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns silu of the first half times the second half of gate_up [T, 2F]: [T, F]."""
    num_tokens, ffn_size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, ffn_size)
    _silu_and_mul_kernel[(num_tokens, triton.cdiv(ffn_size, _SWIGLU_COLUMNS))](
        gate_up, out, FFN=ffn_size, BLOCK=_SWIGLU_COLUMNS, num_warps=4
    )
    return out
