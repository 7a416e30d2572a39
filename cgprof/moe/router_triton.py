"""Softmax, top-k, renormalisation and the padding mask of the router in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TOKENS_PER_PROGRAM = 4


@triton.jit(
    do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["is_padding", "logits"]
)
def _route_kernel(
    logits,  # [T, E]
    is_padding,  # [T]
    weights,  # [T, K]
    expert_ids,  # [T, K]
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NORM_TOPK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    experts = tl.arange(0, BLOCK_E)
    inside = tokens < num_tokens
    is_expert = (experts < NUM_EXPERTS)[None, :]
    scores = tl.load(
        logits + tokens[:, None].to(tl.int64) * NUM_EXPERTS + experts[None, :],
        mask=inside[:, None] & is_expert,
        other=0.0,
    ).to(tl.float32)
    scores = tl.where(is_expert, scores, float("-inf"))
    powers = tl.exp(scores - tl.max(scores, 1)[:, None])
    left = powers / tl.sum(powers, 1)[:, None]
    # A row of NaN must still choose ids below NUM_EXPERTS: they become addresses.
    left = tl.where(is_expert, tl.where(left == left, left, 0.0), -1.0)

    ranks = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    ids = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
    for rank in tl.static_range(TOP_K):
        best = tl.max(left, 1)
        index = tl.argmax(left, 1).to(tl.int32)
        chosen = tl.where((ranks == rank)[None, :], best[:, None], chosen)
        ids = tl.where((ranks == rank)[None, :], index[:, None], ids)
        left = tl.where(experts[None, :] == index[:, None], -1.0, left)
    if NORM_TOPK:
        chosen = chosen / tl.sum(chosen, 1)[:, None]
    padding = tl.load(is_padding + tokens, mask=inside, other=1).to(tl.int1)
    ids = tl.where(padding[:, None], -1, ids)
    at = tokens[:, None] * TOP_K + ranks[None, :]
    wanted = inside[:, None] & (ranks < TOP_K)[None, :]
    tl.store(weights + at, chosen, mask=wanted)
    tl.store(expert_ids + at, ids, mask=wanted)


def route_fused(
    logits: torch.Tensor, is_padding: torch.Tensor, top_k: int, norm_topk: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns weights [T, K] f32 and expert ids [T, K] i32; equal scores go to the lower id."""
    num_tokens, num_experts = logits.shape
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    expert_ids = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits.device)
    _route_kernel[(triton.cdiv(num_tokens, _TOKENS_PER_PROGRAM),)](
        logits,
        is_padding,
        weights,
        expert_ids,
        num_tokens,
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        NORM_TOPK=norm_topk,
        BLOCK_T=_TOKENS_PER_PROGRAM,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_K=triton.next_power_of_2(top_k),
        num_warps=4,
    )
    return weights, expert_ids
