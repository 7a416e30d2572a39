"""Real-token spreading: a rank's few decode rows laid over all microbatches of a twin. Pure.

The only copy of the rule: the decision asks whether every rank could, the writer where each lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from cgprof.microbatch.rule import last_microbatch_is_empty
from cgprof.shapes import BatchShape, DecisionReason, GraphKey, RuntimeMode, StepDecision


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The rows of one microbatch, and which of a rank's tokens lie in the first of them."""

    start: int
    stop: int
    first_token: int
    num_tokens: int


def can_spread(shape: BatchShape, key: GraphKey, fewest: int) -> bool:
    """Returns whether ranks whose smallest has `fewest` tokens may replay this twin spread.

    Every rank runs one token a request, and each microbatch gets one of the smallest rank; an
    idle rank has none to give, so the twin stays refused.

    Args:
        shape: What covers all ranks.
        key: The twin.
        fewest: Real tokens of the smallest rank, idle ones included.
    """
    return (
        shape.uniform_query_len == 1
        and key.is_twin
        and key.mode is RuntimeMode.FULL
        and key.uniform_query_len == 1
        and key.num_reqs == key.num_tokens
        and fewest >= key.num_microbatches
    )


def layout(decision: StepDecision, num_real: int) -> tuple[Region, ...]:
    """Returns where a rank of `num_real` tokens lays them; empty: one after another, as always.

    A rank that reaches the last microbatch anyway is not spread, whatever the others do.
    """
    key = decision.key
    if decision.reason is not DecisionReason.SPREAD:
        return ()
    if not last_microbatch_is_empty(num_real, key.num_tokens, key.num_microbatches):
        return ()
    return regions(num_real, key.num_tokens, key.num_microbatches)


@lru_cache(maxsize=1024)
def regions(num_real: int, num_padded: int, num_microbatches: int) -> tuple[Region, ...]:
    """Returns the region of each microbatch: an even share, the first ones one token more.

    Args:
        num_real: Tokens of the rank, no more than where the last microbatch starts.
        num_padded: Rows of the twin, one a token and a request.
        num_microbatches: Regions; they start at multiples of `num_padded // num_microbatches`.
    """
    width = num_padded // num_microbatches
    share, more = divmod(num_real, num_microbatches)
    last = num_microbatches - 1
    return tuple(
        Region(
            start=index * width,
            stop=num_padded if index == last else (index + 1) * width,
            first_token=index * share + min(index, more),
            num_tokens=share + (index < more),
        )
        for index in range(num_microbatches)
    )
