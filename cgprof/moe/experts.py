"""The experts' feed-forward layers as grouped matmuls over this rank's experts, with no host sync.

Ids count from this rank's first expert; -1 means that none of them runs that row: it adds zero.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional as F

from cgprof.config.schema import ModelConfig
from cgprof.errors import UnsupportedError

_GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL_GATE_UP_DOWN = ("w1", "w3", "w2")
_STRIDE_BYTES = 16  # Source: F.grouped_mm refuses operands whose strides are not multiples of it.


class Experts:
    """SwiGLU experts with stacked weights: gate_up [L, 2F, D] and down [L, D, F]."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        batch_invariant: bool,
        own: range | None = None,
    ) -> None:
        """Allocates the weights of the experts in `own`, None for all, without filling them.

        Raises:
            UnsupportedError: A row of a weight is not a multiple of 16 bytes.
        """
        hidden, ffn = config.hidden_size, config.expert_ffn_size
        for field, size in (("hidden_size", hidden), ("expert_ffn_size", ffn)):
            if size * dtype.itemsize % _STRIDE_BYTES:
                raise UnsupportedError(
                    f"model {config.name}: {field}",
                    f"{size} elements of {dtype} are not a multiple of {_STRIDE_BYTES} bytes, "
                    "which grouped matmuls need; use a size divisible by 8",
                )
        self._ffn_size = ffn
        self._names = _MIXTRAL_GATE_UP_DOWN if config.family == "mixtral" else _GATE_UP_DOWN
        self._batch_invariant = batch_invariant
        self._total = config.num_experts
        self._own = range(self._total) if own is None else own
        count = len(self._own)
        self.gate_up = torch.empty(count, 2 * ffn, hidden, device=device, dtype=dtype)
        self.down = torch.empty(count, hidden, ffn, device=device, dtype=dtype)

    def named_weights(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields each of this rank's experts' weights under its Hugging Face name, as views."""
        for expert, gate_up, down in zip(self._own, self.gate_up, self.down, strict=True):
            parts = (gate_up[: self._ffn_size], gate_up[self._ffn_size :], down)
            for name, part in zip(self._names, parts, strict=True):
                yield f"{prefix}.{expert}.{name}.weight", part

    def forward(
        self, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Returns each row's weighted sum over its experts [T, D], summed in the order of K.

        Args:
            hidden: [T, D].
            expert_ids: [T, K] i32, ids on this rank or -1.
            weights: [T, K] f32.
        """
        if hidden.is_cuda:
            from cgprof.moe.experts_triton import run_experts

            return run_experts(
                hidden,
                expert_ids,
                weights,
                self.gate_up,
                self.down,
                batch_invariant=self._batch_invariant,
                total_experts=self._total,
            )
        return run_experts_plain(hidden, expert_ids, weights, self.gate_up, self.down)


def run_experts_plain(
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """The experts in plain torch: sorted by expert, multiplied, gathered back; the oracle.

    Args:
        hidden: [T, D].
        expert_ids: [T, K] i32.
        weights: [T, K] f32.
        gate_up: [L, 2F, D].
        down: [L, D, F].
    """
    num_tokens, top_k = expert_ids.shape
    num_experts = gate_up.shape[0]
    ids = expert_ids.reshape(-1).to(torch.int64)
    absent = ids < 0
    group = ids.masked_fill(absent, num_experts)
    order = torch.argsort(group, stable=True)
    ones = torch.ones_like(group)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    counts = counts.scatter_add_(0, group, ones)
    offsets = counts[:num_experts].cumsum(0, dtype=torch.int32)

    sorted_rows = hidden.index_select(0, torch.div(order, top_k, rounding_mode="floor"))
    gate, up = F.grouped_mm(sorted_rows, gate_up.transpose(1, 2), offs=offsets).chunk(2, dim=-1)
    results = F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=offsets)
    # Rows past the last offset were never written, hence the mask before the weights.
    rows = results.index_select(0, torch.argsort(order)).to(torch.float32)
    parts = rows.masked_fill(absent[:, None], 0.0) * weights.reshape(-1, 1)
    return parts.view(num_tokens, top_k, -1).sum(dim=1).to(hidden.dtype)
