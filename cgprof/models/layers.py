"""The parts of a decoder layer: linear, norms, rotary embedding, SwiGLU. Plain torch on the CPU.

On CUDA each function is one fused launch of the Triton modules beside; the plain one is its oracle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch.nn import functional as F

from cgprof.config.schema import ModelConfig, RopeConfig
from cgprof.errors import UnsupportedError
from cgprof.kvcache.store import store_kv


class Linear:
    """A projection without bias, weight [out, in]; fixed tiles on CUDA when batch invariant."""

    def __init__(
        self,
        num_out: int,
        num_in: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        batch_invariant: bool,
    ) -> None:
        self.weight = torch.empty(num_out, num_in, device=device, dtype=dtype)
        self._batch_invariant = batch_invariant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x [T, in] times the weight: [T, out]."""
        return linear(x, self.weight, batch_invariant=self._batch_invariant)


def linear(x: torch.Tensor, weight: torch.Tensor, *, batch_invariant: bool) -> torch.Tensor:
    """Returns x [T, in] times weight [out, in]: [T, out]."""
    if batch_invariant and x.is_cuda:
        from cgprof.models.linear_triton import linear_fixed_tiles

        return linear_fixed_tiles(x, weight)
    return F.linear(x, weight)


class RMSNorm:
    """Root-mean-square norm over the last dimension; fp32 inside, cast before the weight."""

    def __init__(self, size: int, eps: float, *, device: torch.device, dtype: torch.dtype) -> None:
        self.weight = torch.empty(size, device=device, dtype=dtype)
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x [T, D] normed."""
        if x.is_cuda:
            from cgprof.models.layers_triton import add_rms_norm_fused

            return add_rms_norm_fused(x, None, self.weight, self._eps, torch.empty_like(x))
        return rms_norm_plain(x, self.weight, self._eps)

    def add_forward(
        self, residual: torch.Tensor, x: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Adds x [T, D] to residual [T, D] in place; returns the sum normed, in `out` if given."""
        if x.is_cuda:
            from cgprof.models.layers_triton import add_rms_norm_fused

            target = torch.empty_like(x) if out is None else out
            return add_rms_norm_fused(residual, x, self.weight, self._eps, target)
        residual.add_(x)
        return rms_norm_plain(residual, self.weight, self._eps, out)


def rms_norm_plain(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns x [..., D] normed and scaled by weight [D]."""
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return torch.mul(normed.to(x.dtype), weight, out=out)


class QKNormRope:
    """Splits the fused projection into heads, norms query and key heads, and rotates them.

    The cosines and sines of all positions are computed once, in fp32, at a fixed address.
    """

    def __init__(self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        self._heads = (config.num_heads, config.num_kv_heads)
        self._head_dim = config.head_dim
        self._eps = config.norm_eps
        weights = (
            torch.empty(2, config.head_dim, device=device, dtype=dtype) if config.qk_norm else None
        )
        self._weights = weights  # query's, key's

    def named_weights(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the weights of the per-head norms, if the model has them."""
        if self._weights is not None:
            yield f"{prefix}.q_norm.weight", self._weights[0]
            yield f"{prefix}.k_norm.weight", self._weights[1]

    def forward(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        rope_table: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        """Writes keys and values to their slots and returns the query [T, H, C].

        On CUDA it is a strided view of `qkv`, which is overwritten.

        Args:
            qkv: [T, (H + 2 G) * C].
            positions: [T].
            rope_table: From `make_rope_table`.
            kv_cache: One layer [blocks, 2, S, G, C].
            slot_mapping: [T] block * S + offset; -1 writes nothing.
        """
        num_heads, num_kv_heads = self._heads
        heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, self._head_dim)
        query: torch.Tensor
        query, key, value = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        if qkv.is_cuda:
            from cgprof.models.heads_triton import norm_rotate_store

            norm_rotate_store(
                heads,
                positions,
                rope_table,
                self._weights,
                kv_cache,
                slot_mapping,
                eps=self._eps,
            )
            return query
        if self._weights is not None:
            query = rms_norm_plain(query, self._weights[0], self._eps)
            key = rms_norm_plain(key, self._weights[1], self._eps)
        angles = rope_table.index_select(0, positions)
        store_kv(rotate_plain(key, angles), value, kv_cache, slot_mapping)
        return rotate_plain(query, angles)


def make_rope_table(config: ModelConfig, device: torch.device) -> torch.Tensor:
    """Returns the cosines and then the sines of every position: [max_positions, C] f32.

    Raises:
        UnsupportedError: The card asks for a scaling that does not exist here.
    """
    rope = config.rope
    if device.type == "meta":  # sizes are asked for; the values may not fit anywhere
        return torch.empty(config.max_positions, config.head_dim, device=device)
    half = torch.arange(0, config.head_dim, 2, dtype=torch.int64).to(torch.float32)
    inverse = 1.0 / (rope.theta ** (half / config.head_dim))
    if rope.kind == "llama3":
        inverse = _scale_low_frequencies(inverse, rope)
    elif rope.kind != "default":
        raise UnsupportedError(
            f"model {config.name}: rope",
            f"scaling '{rope.kind}' cannot be run; use a card with unscaled positions",
        )
    angles = torch.arange(config.max_positions, dtype=torch.float32)[:, None] * inverse
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(device)


def _scale_low_frequencies(inverse: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Returns the frequencies [C / 2] stretched by the factor below a band, blended inside it.

    Source: the scaling that Llama 3.1 cards call `llama3`.
    """
    factor, low, high = rope.factor, rope.low_freq_factor, rope.high_freq_factor
    length = rope.original_max_positions
    assert factor is not None  # the card reader wants all four
    assert low is not None
    assert high is not None
    assert length is not None
    turns = length / (2 * math.pi / inverse)  # of each frequency over the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * inverse / factor + kept * inverse


def rotate_plain(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Returns heads x [T, heads, C] rotated by angles [T, C]: halves are pairs, fp32 inside."""
    cos, sin = angles[:, None, :].chunk(2, dim=-1)
    first, second = x.to(torch.float32).chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


class MLP:
    """The dense SwiGLU feed-forward part, with gate and up in one projection [2F, D]."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        batch_invariant: bool,
    ) -> None:
        hidden, ffn = config.hidden_size, config.ffn_size
        self._ffn_size = ffn
        self._gate_up = Linear(
            2 * ffn, hidden, device=device, dtype=dtype, batch_invariant=batch_invariant
        )
        self._down = Linear(
            hidden, ffn, device=device, dtype=dtype, batch_invariant=batch_invariant
        )

    def named_weights(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the weights under their Hugging Face names, as views."""
        yield f"{prefix}.gate_proj.weight", self._gate_up.weight[: self._ffn_size]
        yield f"{prefix}.up_proj.weight", self._gate_up.weight[self._ffn_size :]
        yield f"{prefix}.down_proj.weight", self._down.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the feed-forward of x [T, D]: [T, D]."""
        return self._down.forward(silu_and_mul(self._gate_up.forward(x)))


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns silu of the first half times the second half of gate_up [T, 2F]: [T, F]."""
    if gate_up.is_cuda:
        from cgprof.models.layers_triton import silu_and_mul_fused

        return silu_and_mul_fused(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
