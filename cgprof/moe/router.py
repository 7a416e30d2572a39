"""Chooses each token's experts: static shapes and no word with the host, hence capturable."""

from __future__ import annotations

import torch


def route(
    logits: torch.Tensor, is_padding: torch.Tensor, *, top_k: int, norm_topk: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each token's weights [T, K] f32 and expert ids [T, K] i32, best first.

    Padding tokens get id -1, which no expert runs: padding costs no expert weights.

    Args:
        logits: [T, E], one score an expert.
        is_padding: [T] bool.
        top_k: Experts per token, K.
        norm_topk: Whether the chosen weights are scaled to sum to one.
    """
    if logits.is_cuda:
        from cgprof.moe.router_triton import route_fused

        return route_fused(logits, is_padding, top_k, norm_topk)
    return route_plain(logits, is_padding, top_k, norm_topk)


def route_plain(
    logits: torch.Tensor, is_padding: torch.Tensor, top_k: int, norm_topk: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The routing of `route` in plain torch; the oracle of the fused kernel."""
    probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
    weights, expert_ids = probabilities.topk(top_k, dim=-1)
    if norm_topk:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    chosen = expert_ids.to(torch.int32).masked_fill(is_padding[:, None], -1)
    return weights, chosen
