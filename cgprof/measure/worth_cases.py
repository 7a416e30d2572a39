"""Which steps are compared plain and split: decode where there are twins, prefill by size. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from cgprof.config.schema import RunConfig
from cgprof.graphs.dispatch import choose, eager_key
from cgprof.shapes import BatchShape, GraphKey

LARGEST_DECODE = 512
SMALLEST_PREFILL, LARGEST_PREFILL = 512, 8192
_MOST_ODD_SIZES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class WorthCase:
    """One step as it runs plain and split; `num_reqs` requests share its tokens evenly."""

    kind: Literal["decode", "prefill"]
    num_tokens: int
    num_reqs: int
    plain: GraphKey
    split: GraphKey


def decode_cases(
    keys: Collection[GraphKey], config: RunConfig
) -> tuple[list[WorthCase], list[str]]:
    """Returns the full decode steps that a twin and a plain key both hold, and what is left out.

    Twins of powers of two up to 512 tokens; the largest others where there are none.
    """
    most = min(LARGEST_DECODE, config.limits.max_num_seqs)
    sizes = sorted({k.num_tokens for k in keys if k.is_twin and k.num_tokens <= most})
    powers = [size for size in sizes if not size & (size - 1)]
    cases, left_out = [], []
    for size in powers or sizes[-_MOST_ODD_SIZES:]:
        shape = BatchShape(num_reqs=size, num_tokens=size, max_query_len=1)
        plain = choose(shape, keys)
        split = choose(shape, keys, num_microbatches=config.microbatch.num_microbatches)
        if plain is None or split is None or {plain.num_tokens, split.num_tokens} != {size}:
            left_out.append(f"decode of {size} tokens: no plain graph and twin of that size")
            continue
        cases.append(
            WorthCase(kind="decode", num_tokens=size, num_reqs=size, plain=plain, split=split)
        )
    return cases, left_out


def prefill_cases(config: RunConfig, free_blocks: int) -> tuple[list[WorthCase], list[str]]:
    """Returns prefill steps of 512 tokens, doubled up to 8192, and why there are not more.

    A smaller prefill threshold begins there. Prompts are whole and as long as a request may be.
    """
    limits, microbatch = config.limits, config.microbatch
    size = min(SMALLEST_PREFILL, max(microbatch.prefill_token_threshold, 1))
    cases: list[WorthCase] = []
    while size <= LARGEST_PREFILL:
        num_reqs = -(-size // limits.max_model_len)
        longest = -(-size // num_reqs)
        blocks = num_reqs * -(-longest // limits.block_size)
        stops = {
            "max_num_batched_tokens": size > limits.max_num_batched_tokens,
            "max_num_seqs times max_model_len": num_reqs > limits.max_num_seqs,
            "the KV cache": blocks > free_blocks,
        }
        stop = next((name for name, holds in stops.items() if holds), None)
        if stop is not None:
            return cases, [f"prefill of {size} tokens and more: beyond {stop}"]
        split = eager_key(size, microbatch.num_microbatches)
        cases.append(
            WorthCase(
                kind="prefill",
                num_tokens=size,
                num_reqs=num_reqs,
                plain=eager_key(size),
                split=split,
            )
        )
        size *= 2
    return cases, []
