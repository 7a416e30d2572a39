"""How many weights a model of some shape has, part by part, and the bytes that they take.

Right to the byte for the families that run. Of others, biases and whatever is special to them are
not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cgprof.config.quantisation import Quantisation


class ExpertShape(NamedTuple):
    """Sizes of the layers of experts; 0 stands for what the card does not say."""

    layers: tuple[int, ...]
    num_experts: int
    ffn_size: int
    shared_ffn_size: int = 0  # of all shared experts together
    has_shared_gate: bool = False


class LatentShape(NamedTuple):
    """Sizes of latent attention; 0 stands for what the card does not say."""

    kv_lora_rank: int
    qk_rope_head_dim: int
    q_lora_rank: int = 0  # 0: the query has no low-rank step
    qk_nope_head_dim: int = 0
    v_head_dim: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightShape:
    """The sizes that weights follow from; 0 stands for what the card does not say."""

    num_layers: int
    attention_layers: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    experts: ExpertShape | None = None
    latent: LatentShape | None = None
    tied_embeddings: bool = False
    qk_norm: bool = False
    gated_ffn: bool = True

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The layers whose feed-forward part is dense."""
        sparse = () if self.experts is None else self.experts.layers
        return tuple(layer for layer in range(self.num_layers) if layer not in set(sparse))


class WeightPart(NamedTuple):
    """One line of a model's weights; None where the card leaves a size open."""

    name: str
    num_parameters: int | None
    num_quantised: int | None  # of the parameters
    num_bytes: int | None


class _Matrix(NamedTuple):
    module: str  # dotted name; one of `copies` alike
    num_out: int
    num_in: int
    copies: int = 1


Matrices = Iterator[_Matrix]
_EXPERTS = "experts"
# Source: published quantised checkpoints leave these as they are, listed or not.
_NEVER_QUANTISED = ("embeddings", "output head", "norms", "routers")


def weight_parts(
    shape: WeightShape, element_bytes: int, quantisation: Quantisation | None = None
) -> tuple[WeightPart, ...]:
    """Returns the parts that a model has; `element_bytes` holds for what is not quantised."""
    parts = []
    for name, matrices in _PARTS.items():
        held = list(matrices(shape))
        if not held:
            continue
        if any(not matrix.num_out or not matrix.num_in for matrix in held):
            parts.append(WeightPart(name, None, None, None))
            continue
        covered = name not in _NEVER_QUANTISED and (
            quantisation is not None and (name == _EXPERTS or not quantisation.experts_only)
        )
        parts.append(_sized(name, held, element_bytes, quantisation if covered else None))
    return tuple(parts)


def _sized(
    name: str, held: list[_Matrix], element_bytes: int, quantisation: Quantisation | None
) -> WeightPart:
    num_parameters = num_bytes = quantised = 0
    ignores = None if quantisation is None else quantisation.ignores()
    for matrix in held:
        size = matrix.num_out * matrix.num_in
        num_parameters += size * matrix.copies
        if quantisation is None or ignores is None or ignores(matrix.module):
            num_bytes += size * element_bytes * matrix.copies
        else:
            num_bytes += quantisation.matrix_bytes(matrix.num_out, matrix.num_in) * matrix.copies
            quantised += size * matrix.copies
    return WeightPart(name, num_parameters, quantised, num_bytes)


def _embeddings(shape: WeightShape) -> Matrices:
    yield _Matrix("model.embed_tokens", shape.vocab_size, shape.hidden_size)


def _output_head(shape: WeightShape) -> Matrices:
    if not shape.tied_embeddings:
        yield _Matrix("lm_head", shape.vocab_size, shape.hidden_size)


def _attention(shape: WeightShape) -> Matrices:
    for layer in shape.attention_layers:
        name = f"model.layers.{layer}.self_attn"
        if shape.latent is None:
            yield from _heads(shape, name)
        else:
            yield from _latent(shape, shape.latent, name)


def _heads(shape: WeightShape, name: str) -> Matrices:
    query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield _Matrix(f"{name}.q_proj", query, shape.hidden_size)
    yield _Matrix(f"{name}.k_proj", kv, shape.hidden_size)
    yield _Matrix(f"{name}.v_proj", kv, shape.hidden_size)
    yield _Matrix(f"{name}.o_proj", shape.hidden_size, query)


def _latent(shape: WeightShape, latent: LatentShape, name: str) -> Matrices:
    """Source: the projections of DeepSeek-V2, whose names its descendants keep."""
    nope, rope, value = latent.qk_nope_head_dim, latent.qk_rope_head_dim, latent.v_head_dim
    known = bool(nope and value)
    query = shape.num_heads * (nope + rope) * known
    if latent.q_lora_rank:
        yield _Matrix(f"{name}.q_a_proj", latent.q_lora_rank, shape.hidden_size)
        yield _Matrix(f"{name}.q_b_proj", query, latent.q_lora_rank)
    else:
        yield _Matrix(f"{name}.q_proj", query, shape.hidden_size)
    expanded = shape.num_heads * (nope + value) * known
    yield _Matrix(f"{name}.kv_a_proj_with_mqa", latent.kv_lora_rank + rope, shape.hidden_size)
    yield _Matrix(f"{name}.kv_b_proj", expanded, latent.kv_lora_rank)
    yield _Matrix(f"{name}.o_proj", shape.hidden_size, shape.num_heads * value)


def _norms(shape: WeightShape) -> Matrices:
    yield _Matrix("model.norm", 1, shape.hidden_size)
    yield _Matrix("model.layers.*.input_layernorm", 1, shape.hidden_size, shape.num_layers)
    yield _Matrix("model.layers.*.post_attention_layernorm", 1, shape.hidden_size, shape.num_layers)
    attending, name = len(shape.attention_layers), "model.layers.*.self_attn"
    if shape.qk_norm:
        yield _Matrix(f"{name}.qk_norm", 2, shape.head_dim, attending)
    if shape.latent is not None:
        yield _Matrix(f"{name}.kv_a_layernorm", 1, shape.latent.kv_lora_rank, attending)
        if shape.latent.q_lora_rank:
            yield _Matrix(f"{name}.q_a_layernorm", 1, shape.latent.q_lora_rank, attending)


def _routers(shape: WeightShape) -> Matrices:
    if shape.experts is not None:
        copies = len(shape.experts.layers)
        num_experts = shape.experts.num_experts
        yield _Matrix("model.layers.*.mlp.gate", num_experts, shape.hidden_size, copies)


def _experts(shape: WeightShape) -> Matrices:
    experts = shape.experts
    if experts is None:
        return
    for layer in experts.layers:
        name = f"model.layers.{layer}.mlp.experts"
        yield from _ffn(shape, name, experts.ffn_size, copies=experts.num_experts)


def _shared_experts(shape: WeightShape) -> Matrices:
    experts = shape.experts
    if experts is None or not experts.shared_ffn_size:
        return
    for layer in experts.layers:
        name = f"model.layers.{layer}.mlp"
        yield from _ffn(shape, f"{name}.shared_experts", experts.shared_ffn_size)
        if experts.has_shared_gate:
            yield _Matrix(f"{name}.shared_expert_gate", 1, shape.hidden_size)


def _dense(shape: WeightShape) -> Matrices:
    for layer in shape.dense_layers:
        yield from _ffn(shape, f"model.layers.{layer}.mlp", shape.ffn_size)


def _ffn(shape: WeightShape, name: str, width: int, *, copies: int = 1) -> Matrices:
    if shape.gated_ffn:
        yield _Matrix(f"{name}.gate_proj", width, shape.hidden_size, copies)
    yield _Matrix(f"{name}.up_proj", width, shape.hidden_size, copies)
    yield _Matrix(f"{name}.down_proj", shape.hidden_size, width, copies)


_PARTS: dict[str, Callable[[WeightShape], Matrices]] = {
    "embeddings": _embeddings,
    "output head": _output_head,
    "attention": _attention,
    "norms": _norms,
    "routers": _routers,
    _EXPERTS: _experts,
    "shared experts": _shared_experts,
    "dense feed-forward": _dense,
}
