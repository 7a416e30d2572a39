"""The same decoder as `decoder`, over whole padded sequences and with gradients, for training.

It holds no weights: they are a mapping of the Hugging Face names, so that what was trained loads
into the engine as it is. The parts with formulas are the engine's own plain ones.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional as F

from cgprof.config.schema import ModelConfig
from cgprof.models.layers import make_rope_table, rms_norm_plain, rotate_plain
from cgprof.models.zoo import build_model
from cgprof.moe.dispatcher import LocalDispatcher
from cgprof.moe.router import route_plain

Weights = Mapping[str, torch.Tensor]


def initial_weights(
    config: ModelConfig, seed: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Returns seeded float32 weights by name, leaves that take gradients."""
    model = build_model(
        config,
        device=device,
        dtype=torch.float32,
        dispatcher=LocalDispatcher(loopback=False),
        batch_invariant=False,
        seed=seed,
    )
    return {name: tensor.clone().requires_grad_() for name, tensor in model.named_weights()}


class DifferentiableDecoder:
    """A mixture-of-experts decoder as a function of its weights."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._config = config
        self._rope_table = make_rope_table(config, device)

    def forward(self, weights: Weights, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the scores [B, N, V] of sequences [B, N] and the load imbalance, 1 when even.

        The imbalance is the mean over layers of E x sum over experts of the share of tokens sent
        to it times its mean probability. Source: the Switch Transformer's auxiliary loss.
        """
        config = self._config
        size = (*tokens.shape, -1)
        angles = self._rope_table[: tokens.shape[1]].repeat(tokens.shape[0], 1)
        residual = F.embedding(tokens.reshape(-1), weights["model.embed_tokens.weight"])
        imbalance = residual.new_zeros(())
        for layer in range(config.num_layers):
            prefix = f"model.layers.{layer}"
            x = self._norm(residual, weights[f"{prefix}.input_layernorm.weight"])
            residual = residual + self._attend(weights, f"{prefix}.self_attn", x, angles, size)
            x = self._norm(residual, weights[f"{prefix}.post_attention_layernorm.weight"])
            out, uneven = self._experts(weights, f"{prefix}.mlp", x)
            residual = residual + out
            imbalance = imbalance + uneven / config.num_layers
        hidden = self._norm(residual, weights["model.norm.weight"])
        head = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
        return F.linear(hidden, weights[head]).view(size), imbalance

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm_plain(x, weight, self._config.norm_eps)

    def _attend(
        self,
        weights: Weights,
        prefix: str,
        x: torch.Tensor,
        angles: torch.Tensor,
        size: tuple[int, ...],
    ) -> torch.Tensor:
        config = self._config

        def heads(name: str) -> torch.Tensor:
            projected = F.linear(x, weights[f"{prefix}.{name}_proj.weight"])
            return projected.view(x.shape[0], -1, config.head_dim)

        query = rotate_plain(self._norm(heads("q"), weights[f"{prefix}.q_norm.weight"]), angles)
        key = rotate_plain(self._norm(heads("k"), weights[f"{prefix}.k_norm.weight"]), angles)
        groups = config.num_heads // config.num_kv_heads

        def by_head(part: torch.Tensor) -> torch.Tensor:
            return part.view(*size[:-1], -1, config.head_dim).transpose(1, 2)

        attended = F.scaled_dot_product_attention(
            by_head(query),
            by_head(key.repeat_interleave(groups, dim=1)),
            by_head(heads("v").repeat_interleave(groups, dim=1)),
            is_causal=True,
        )
        flat = attended.transpose(1, 2).reshape(x.shape[0], -1)
        return F.linear(flat, weights[f"{prefix}.o_proj.weight"])

    def _experts(
        self, weights: Weights, prefix: str, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        config = self._config
        top_k, num_experts = config.experts_per_token, config.num_experts
        logits = F.linear(x, weights[f"{prefix}.gate.weight"])
        padding = torch.zeros(x.shape[0], dtype=torch.bool, device=x.device)
        shares, expert_ids = route_plain(logits, padding, top_k, config.norm_topk)
        flat = expert_ids.reshape(-1).to(torch.int64)
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=num_experts)
        rows = x.index_select(0, torch.div(order, top_k, rounding_mode="floor"))
        results = []
        for expert, part in enumerate(rows.split(counts.tolist())):
            name = f"{prefix}.experts.{expert}"
            gate = F.silu(F.linear(part, weights[f"{name}.gate_proj.weight"]))
            up = F.linear(part, weights[f"{name}.up_proj.weight"])
            results.append(F.linear(gate * up, weights[f"{name}.down_proj.weight"]))
        sent = torch.cat(results).index_select(0, torch.argsort(order))
        out = (sent.view(*shares.shape, -1) * shares[..., None]).sum(dim=1)
        probabilities = torch.softmax(logits, dim=-1).mean(dim=0)
        return out, num_experts * (counts / flat.numel() * probabilities).sum()
