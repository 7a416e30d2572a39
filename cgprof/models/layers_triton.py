"""Add and norm, and SwiGLU, each in one launch.

One program works on whole rows with a fixed tile, so that a row never depends on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

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


def silu_and_mul_fused(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns silu of the first half times the second half of gate_up [T, 2F]: [T, F]."""
    num_tokens, ffn_size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, ffn_size)
    _silu_and_mul_kernel[(num_tokens, triton.cdiv(ffn_size, _SWIGLU_COLUMNS))](
        gate_up, out, FFN=ffn_size, BLOCK=_SWIGLU_COLUMNS, num_warps=4
    )
    return out
