"""Makes the token dispatcher that a run asks for."""

from __future__ import annotations

import torch

from cgprof.config.schema import All2AllBackend, ModelConfig, ParallelConfig
from cgprof.moe.all_gather import AllGatherDispatcher
from cgprof.moe.all_to_all import AllToAllDispatcher
from cgprof.moe.dispatcher import LocalDispatcher, TokenDispatcher
from cgprof.moe.exact import ExactDispatcher
from cgprof.moe.symmetric import SymmetricDispatcher
from cgprof.moe.traffic import RowFormat
from cgprof.parallel.groups import Ranks


def make_dispatcher(
    parallel: ParallelConfig,
    ranks: Ranks | None,
    model: ModelConfig,
    *,
    dtype: torch.dtype,
    max_tokens: int,
    num_microbatches: int,
    loopback: bool,
) -> TokenDispatcher:
    """Returns the run's dispatcher; one rank, or a model without experts, exchanges nothing.

    Args:
        parallel: Names the exchange of several ranks and its capacity.
        ranks: This rank among its peers; None: alone.
        model: The model's card.
        dtype: Of hidden states.
        max_tokens: The most tokens of a step, on any rank.
        num_microbatches: How many parts of a step are in flight at once; 1 if none is split.
        loopback: Whether one rank copies through the handoff all the same.

    Raises:
        ConfigError: More ranks than experts.
        UnsupportedError: The exchange needs GPUs, and the ranks are on CPUs.
        DeviceError: Their GPUs cannot write to each other, as the exchange needs.
        RankError: A rank did not answer while the exchange was set up.
    """
    if ranks is None or ranks.size == 1 or not model.is_moe:
        return LocalDispatcher(loopback=loopback)
    if parallel.all2all_backend is All2AllBackend.EXACT:
        return ExactDispatcher(ranks, num_experts=model.num_experts)
    row = row_format(model, dtype)
    if parallel.all2all_backend is All2AllBackend.ALLGATHER_REDUCESCATTER:
        return AllGatherDispatcher(
            ranks,
            num_experts=model.num_experts,
            row=row,
            dtype=dtype,
            max_tokens=max_tokens,
            num_microbatches=num_microbatches,
        )
    one_sided = parallel.all2all_backend is All2AllBackend.SYMMETRIC_MEMORY
    in_blocks = SymmetricDispatcher if one_sided else AllToAllDispatcher
    return in_blocks(
        ranks,
        num_experts=model.num_experts,
        row=row,
        dtype=dtype,
        max_tokens=max_tokens,
        num_microbatches=num_microbatches,
        capacity=parallel.dispatch_capacity,
    )


def row_format(model: ModelConfig, dtype: torch.dtype) -> RowFormat:
    """Returns what one token of a model weighs in an exchange."""
    return RowFormat(
        hidden_size=model.hidden_size, itemsize=dtype.itemsize, top_k=model.experts_per_token
    )
