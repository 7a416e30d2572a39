"""A decoder-only transformer over paged KV: Qwen3, Qwen3-MoE, Mixtral, Llama and its mixture.

A forward pass keeps no state on the model, so that microbatch threads may share it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional as F

from cgprof.attention.backend import AttentionBackend
from cgprof.batch.context import ForwardContext
from cgprof.config.schema import ModelConfig
from cgprof.errors import ConfigError, UnsupportedError
from cgprof.models.layers import MLP, Linear, QKNormRope, RMSNorm, linear, make_rope_table
from cgprof.moe.dispatcher import TokenDispatcher
from cgprof.moe.experts import Experts
from cgprof.moe.layer import MoELayer

NamedWeights = Iterator[tuple[str, torch.Tensor]]


class SelfAttention:
    """Fused q, k and v projection, norm and rotation of heads, paged attention, projection."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        batch_invariant: bool,
    ) -> None:
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self._sizes = (query_size, kv_size, kv_size)
        self._qkv = Linear(
            sum(self._sizes),
            config.hidden_size,
            device=device,
            dtype=dtype,
            batch_invariant=batch_invariant,
        )
        self._heads = QKNormRope(config, device=device, dtype=dtype)
        self._out = Linear(
            config.hidden_size,
            query_size,
            device=device,
            dtype=dtype,
            batch_invariant=batch_invariant,
        )

    def named_weights(self, prefix: str) -> NamedWeights:
        """Yields the weights under their Hugging Face names, as views."""
        for name, rows in zip("qkv", self._qkv.weight.split(self._sizes), strict=True):
            yield f"{prefix}.{name}_proj.weight", rows
        yield f"{prefix}.o_proj.weight", self._out.weight
        yield from self._heads.named_weights(prefix)

    def forward(
        self,
        x: torch.Tensor,
        context: ForwardContext,
        rope_table: torch.Tensor,
        kv_cache: torch.Tensor,
        backend: AttentionBackend,
    ) -> torch.Tensor:
        """Returns the attention output [T, D] of x [T, D]; writes this step's keys and values."""
        query = self._heads.forward(
            self._qkv.forward(x),
            context.batch.positions,
            rope_table,
            kv_cache,
            context.attention.slot_mapping,
        )
        attended = backend.attend(query, kv_cache, context.attention)
        return self._out.forward(attended.reshape(x.shape[0], -1))


class DecoderLayer:
    """Attention and a feed-forward part, each behind a norm and added to the residual."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        dispatcher: TokenDispatcher,
        batch_invariant: bool,
        experts: range | None,
    ) -> None:
        size, eps = config.hidden_size, config.norm_eps
        self.attention = SelfAttention(
            config, device=device, dtype=dtype, batch_invariant=batch_invariant
        )
        self.attention_norm = RMSNorm(size, eps, device=device, dtype=dtype)
        self.ffn_norm = RMSNorm(size, eps, device=device, dtype=dtype)
        self.moe: MoELayer | None = None
        if not config.is_moe:
            self._mlp = MLP(config, device=device, dtype=dtype, batch_invariant=batch_invariant)
            return
        self._moe_name = "block_sparse_moe" if config.family == "mixtral" else "mlp"
        self._gate = Linear(
            config.num_experts, size, device=device, dtype=dtype, batch_invariant=batch_invariant
        )
        self.moe = MoELayer(
            config,
            gate=self._gate.forward,
            experts=Experts(
                config, device=device, dtype=dtype, batch_invariant=batch_invariant, own=experts
            ),
            dispatcher=dispatcher,
        )

    def named_weights(self, prefix: str) -> NamedWeights:
        """Yields the layer's weights under their Hugging Face names, as views."""
        yield f"{prefix}.input_layernorm.weight", self.attention_norm.weight
        yield from self.attention.named_weights(f"{prefix}.self_attn")
        yield f"{prefix}.post_attention_layernorm.weight", self.ffn_norm.weight
        if self.moe is None:
            yield from self._mlp.named_weights(f"{prefix}.mlp")
        else:
            yield f"{prefix}.{self._moe_name}.gate.weight", self._gate.weight
            yield from self.moe.named_weights(f"{prefix}.{self._moe_name}")

    def feed_forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Returns the experts' or the dense part's output [T, D] of x [T, D]."""
        return self._mlp.forward(x) if self.moe is None else self.moe.forward(x, context)


class Decoder:
    """The model of all modes: what a graph captures is `forward`, exactly."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        dispatcher: TokenDispatcher,
        batch_invariant: bool,
        experts: range | None = None,
    ) -> None:
        """Allocates the weights, of the experts only those in `experts`, without filling them.

        Raises:
            UnsupportedError: A batch-invariant run without CUDA, or a rope that cannot be run.
        """
        if batch_invariant and device.type == "cpu":
            raise UnsupportedError(
                "model.batch_invariant",
                "the CPU's matmuls choose their order by the batch; run on CUDA or switch it off",
            )
        self.config = config
        self.experts = range(config.num_experts) if experts is None else experts
        self._batch_invariant = batch_invariant
        self._embedding = torch.empty(
            config.vocab_size, config.hidden_size, device=device, dtype=dtype
        )
        self._head = (
            self._embedding if config.tied_embeddings else torch.empty_like(self._embedding)
        )
        self._rope_table = make_rope_table(config, device)
        self._layers = [
            DecoderLayer(
                config,
                device=device,
                dtype=dtype,
                dispatcher=dispatcher,
                batch_invariant=batch_invariant,
                experts=experts,
            )
            for _ in range(config.num_layers)
        ]
        self._norm = RMSNorm(config.hidden_size, config.norm_eps, device=device, dtype=dtype)
        self._caches: tuple[torch.Tensor, ...] = ()
        self._backend: AttentionBackend | None = None

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of all weights that this rank holds, tied ones once."""
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.named_weights())

    def named_weights(self) -> NamedWeights:
        """Yields this rank's weights once under their Hugging Face names, as views to be filled."""
        yield "model.embed_tokens.weight", self._embedding
        for index, layer in enumerate(self._layers):
            yield from layer.named_weights(f"model.layers.{index}")
        yield "model.norm.weight", self._norm.weight
        if not self.config.tied_embeddings:
            yield "lm_head.weight", self._head

    def cache_address(self) -> int:
        """Where the bound cache lies; 0 while none is bound."""
        return self._caches[0].data_ptr() if self._caches else 0

    def bind_cache(self, kv: torch.Tensor, backend: AttentionBackend) -> None:
        """Gives the model its cache [num_layers, blocks, 2, S, G, C] and the way to use it.

        Raises:
            ConfigError: The cache was made for another model.
        """
        config = self.config
        expected = (config.num_layers, 2, config.num_kv_heads, config.head_dim)
        found = (kv.shape[0], *kv.shape[2:3], *kv.shape[4:])
        if found != expected:
            raise ConfigError(
                "kv cache",
                f"layers, planes, heads and head size are {found}, the model needs {expected}",
            )
        self._caches = kv.unbind(0)
        self._backend = backend

    def forward(self, context: ForwardContext, out: torch.Tensor) -> None:
        """Writes the final-normed hidden states of the context's tokens into `out` [T, D].

        Raises:
            ConfigError: No cache is bound, or `out` has another shape.
        """
        self._run(context, out, None)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the scores [r, V] of hidden [r, D] in the model's dtype."""
        return linear(hidden, self._head, batch_invariant=self._batch_invariant)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the scores [r, V] f32 of hidden [r, D]."""
        return self.scores(hidden).to(torch.float32)

    def expert_usage(self, context: ForwardContext, out: torch.Tensor) -> torch.Tensor:
        """Returns how many distinct experts each MoE layer's real tokens hit [MoE layers] i64.

        A diagnostic that runs `forward` with a second routing; never timed or captured.
        """
        routings = self.routings(context, out)
        hit = torch.zeros(len(routings), self.config.num_experts + 1, device=out.device)
        if len(routings):
            hit.scatter_(1, routings.flatten(1).to(torch.int64) + 1, 1.0)
        return hit[:, 1:].sum(dim=1).to(torch.int64)

    def routings(self, context: ForwardContext, out: torch.Tensor) -> torch.Tensor:
        """Returns each MoE layer's expert ids [MoE layers, T, K] i32, -1 in padding.

        A diagnostic as `expert_usage`.
        """
        found: list[torch.Tensor] = []
        self._run(context, out, found)
        top_k = self.config.experts_per_token
        empty = torch.zeros((0, out.shape[0], top_k), dtype=torch.int32, device=out.device)
        return torch.stack(found) if found else empty

    def _run(
        self, context: ForwardContext, out: torch.Tensor, routings: list[torch.Tensor] | None
    ) -> None:
        if self._backend is None:
            raise ConfigError("model", "no kv cache is bound; call bind_cache before forward")
        residual = F.embedding(context.batch.input_ids, self._embedding)
        if out.shape != residual.shape or not out.is_contiguous():
            raise ConfigError(
                "model output",
                f"{tuple(out.shape)} with strides {out.stride()} is not a contiguous "
                f"{tuple(residual.shape)}",
            )
        delta: torch.Tensor | None = None
        for layer, cache in zip(self._layers, self._caches, strict=True):
            norm = layer.attention_norm
            x = norm.forward(residual) if delta is None else norm.add_forward(residual, delta)
            delta = layer.attention.forward(x, context, self._rope_table, cache, self._backend)
            x = layer.ffn_norm.add_forward(residual, delta)
            if routings is not None and layer.moe is not None:
                routings.append(layer.moe.route(x, context)[1])
            delta = layer.feed_forward(x, context)
        assert delta is not None  # the schema wants at least one layer
        self._norm.add_forward(residual, delta, out)
