"""Keys, shapes, votes and buffers in one short call."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from cgprof.batch.buffers import InputBuffers
from cgprof.config.schema import CaptureConfig, Limits, MicrobatchConfig
from cgprof.graphs.dispatch import vote
from cgprof.graphs.plan import CapturePlan, make_plan
from cgprof.shapes import BatchShape, CapturePolicy, GraphKey, RuntimeMode, StepVote

DBO = MicrobatchConfig(enabled=True)
NO_DBO = MicrobatchConfig()


def decode_key(num_reqs: int, *, query_len: int = 1, num_microbatches: int = 1) -> GraphKey:
    return GraphKey(
        mode=RuntimeMode.FULL,
        num_tokens=num_reqs * query_len,
        num_reqs=num_reqs,
        uniform_query_len=query_len,
        num_microbatches=num_microbatches,
    )


def decode(num_reqs: int, query_len: int = 1) -> BatchShape:
    return BatchShape(num_reqs=num_reqs, num_tokens=num_reqs * query_len, max_query_len=query_len)


def prefill(num_tokens: int, num_reqs: int = 1) -> BatchShape:
    return BatchShape(
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        max_query_len=num_tokens - num_reqs + 1,
        num_prefills=1,
    )


def votes(
    shapes: Iterable[BatchShape], keys: Iterable[GraphKey], config: MicrobatchConfig = DBO
) -> list[StepVote]:
    keys = tuple(keys)
    return [vote(shape, keys, config) for shape in shapes]


def plan(
    policy: CapturePolicy = CapturePolicy.FULL_DECODE_ONLY,
    *,
    seqs: int = 256,
    tokens: int = 2048,
    sizes: tuple[int, ...] | None = None,
    max_size: int | None = None,
    microbatch: MicrobatchConfig = NO_DBO,
    query_lens: tuple[int, ...] = (1,),
) -> CapturePlan:
    return make_plan(
        policy,
        Limits(max_num_seqs=seqs, max_num_batched_tokens=tokens),
        CaptureConfig(sizes=sizes, max_size=max_size),
        microbatch,
        query_lens=query_lens,
    )


def input_buffers(device: str = "cpu") -> InputBuffers:
    return InputBuffers(
        max_num_tokens=64,
        max_num_reqs=64,
        blocks_per_request=2,
        num_microbatches=2,
        device=torch.device(device),
    )
