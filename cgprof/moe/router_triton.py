"""Softmax, top-k, renormalisation and the padding mask of the router in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["is_padding", "logits"])
def _route_kernel(
    logits,  # [T, E]
    is_padding,  # [T]
    weights,  # [T, K]
    expert_ids,  # [T, K]
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NORM_TOPK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_E)
    is_expert = experts < NUM_EXPERTS
    scores = tl.load(
        logits + token * NUM_EXPERTS + experts, mask=is_expert, other=float("-inf")
    ).to(tl.float32)
    powers = tl.exp(scores - tl.max(scores, 0))
    shares = powers / tl.sum(powers, 0)
    # A row of NaN must still choose ids below NUM_EXPERTS: they become addresses.
    shares = tl.where(shares == shares, shares, 0.0)
    # Bits of positive floats order like the floats; the lower id goes first among equal ones.
    order = (shares.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (BLOCK_E - 1 - experts)
    order = tl.where(is_expert, order, -1)

    ranks = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.float32)
    ids = tl.zeros([BLOCK_K], tl.int32)
    for rank in tl.static_range(TOP_K):
        best = tl.max(order, 0)
        share = (best >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        index = BLOCK_E - 1 - (best & 0x7FFFFFFF).to(tl.int32)
        chosen = tl.where(ranks == rank, share, chosen)
        ids = tl.where(ranks == rank, index, ids)
        order = tl.where(order == best, -1, order)
    if NORM_TOPK:
        chosen = chosen / tl.sum(chosen, 0)
    padding = tl.load(is_padding + token).to(tl.int1)
    ids = tl.where(padding, -1, ids)
    at = token * TOP_K + ranks
    tl.store(weights + at, chosen, mask=ranks < TOP_K)
    tl.store(expert_ids + at, ids, mask=ranks < TOP_K)


def route_fused(
    logits: torch.Tensor, is_padding: torch.Tensor, top_k: int, norm_topk: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns weights [T, K] f32 and expert ids [T, K] i32; equal scores go to the lower id."""
    num_tokens, num_experts = logits.shape
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    expert_ids = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits.device)
    _route_kernel[(num_tokens,)](
        logits,
        is_padding,
        weights,
        expert_ids,
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        NORM_TOPK=norm_topk,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_K=triton.next_power_of_2(top_k),
        num_warps=1,
    )
    return weights, expert_ids
