"""One mixture-of-experts layer: route, dispatch, run the experts, combine; no threads in sight."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from cgprof.batch.context import ForwardContext
from cgprof.config.schema import ModelConfig
from cgprof.moe.dispatcher import TokenDispatcher
from cgprof.moe.experts import Experts
from cgprof.moe.router import route


class MoELayer:
    """The feed-forward part of a decoder layer. `gate` maps [T, D] to router logits [T, E]."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        gate: Callable[[torch.Tensor], torch.Tensor],
        experts: Experts,
        dispatcher: TokenDispatcher,
    ) -> None:
        self._top_k = config.experts_per_token
        self._norm_topk = config.norm_topk
        self._uniform = config.uniform_routing
        self._gate = gate
        self._experts = experts
        self._dispatcher = dispatcher

    def named_weights(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the experts' weights; the owner of `gate` names the gate's."""
        yield from self._experts.named_weights(f"{prefix}.experts")

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Returns the experts' weighted sums [T, D] for x [T, D]; padding rows get zero."""
        weights, expert_ids = self.route(x, context)
        handle = self._dispatcher.dispatch(x, expert_ids, weights, context.handoff)
        sums = self._experts.forward(handle.hidden, handle.expert_ids, handle.weights)
        return self._dispatcher.combine(handle, sums, context.handoff)

    def route(self, x: torch.Tensor, context: ForwardContext) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the weights [T, K] and expert ids [T, K] of x [T, D]."""
        weights, expert_ids = route(
            self._gate(x), context.batch.is_padding, top_k=self._top_k, norm_topk=self._norm_topk
        )
        return (weights.fill_(1.0) if self._uniform else weights), expert_ids
