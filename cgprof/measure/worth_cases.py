"""Which steps are compared plain and split. Pure.

Decode where there are twins, prefill by size, and loads at which spreading keeps a twin.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from cgprof.config.schema import MicrobatchConfig, RunConfig
from cgprof.graphs.dispatch import choose, decide, eager_key, vote
from cgprof.graphs.vetoes import vetoes
from cgprof.microbatch.rule import last_microbatch_is_empty
from cgprof.shapes import BatchShape, GraphKey, StepDecision, StepVote

LARGEST_DECODE = 512
SMALLEST_PREFILL, LARGEST_PREFILL = 512, 8192
_MOST_ODD_SIZES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class WorthCase:
    """One step as it runs plain and split; `num_reqs` requests share its tokens evenly.

    All ranks run `num_tokens`, unless `decided` says otherwise.
    """

    kind: Literal["decode", "prefill", "spread"]
    num_tokens: int
    num_reqs: int
    plain: GraphKey
    split: GraphKey
    decided: tuple[StepDecision, StepDecision] | None = None  # plain and split, of an uneven load

    @property
    def tokens_per_rank(self) -> tuple[int, ...]:
        """The tokens of each rank of an uneven load, else nothing."""
        return self.decided[0].tokens_per_rank if self.decided else ()


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


def spread_cases(
    decodes: Sequence[WorthCase],
    keys: Collection[GraphKey],
    config: RunConfig,
    num_ranks: int,
) -> tuple[list[WorthCase], list[str]]:
    """Returns, for each decode step's size, the load at which spreading keeps the twin.

    All ranks are full but the last, which has the most tokens that leave its last microbatch
    empty. Both decisions are those of the ranks' votes; a size at which spreading changes nothing
    is left out. Nothing where nothing is spread, and on one rank the reason alone.

    Args:
        decodes: The full decode steps.
        keys: What all ranks captured.
        config: The run's.
        num_ranks: Ranks that decide together.
    """
    if not config.microbatch.spread_real_tokens:
        return [], []
    if num_ranks == 1:
        return [], [
            "spreading: it keeps a twin for a rank with fewer tokens than others, and this is one"
        ]
    on = config.microbatch
    off = on.model_copy(update={"spread_real_tokens": False})
    cases, left_out = [], []
    for decode in decodes:
        size = decode.num_tokens
        load = (*[size] * (num_ranks - 1), _most_too_few(size, on.num_microbatches))
        fallen, kept = (decide(_votes(load, keys, one), keys, one) for one in (off, on))
        if fallen == kept:
            why = [f"{kept.key} ({kept.reason.value}) with spreading and without"]
            why += [
                f"rank {v.rank} is {v.reason.value}" for v in vetoes(_votes(load, keys, on), on)
            ]
            left_out.append(
                f"spread of {size} tokens, {load[-1]} on the last rank: {', '.join(why)}"
            )
            continue
        cases.append(
            WorthCase(
                kind="spread",
                num_tokens=size,
                num_reqs=size,
                plain=fallen.key,
                split=kept.key,
                decided=(fallen, kept),
            )
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


def _votes(
    load: Sequence[int], keys: Collection[GraphKey], microbatch: MicrobatchConfig
) -> list[StepVote]:
    """Votes of ranks that decode that many tokens."""
    shapes = [
        BatchShape(num_reqs=tokens, num_tokens=tokens, max_query_len=min(tokens, 1))
        for tokens in load
    ]
    return [vote(shape, keys, microbatch) for shape in shapes]


def _most_too_few(num_tokens: int, num_microbatches: int) -> int:
    """The most tokens that do not reach the last microbatch of a twin of `num_tokens`."""
    return max(
        fewer
        for fewer in range(num_tokens)
        if last_microbatch_is_empty(fewer, num_tokens, num_microbatches)
    )
