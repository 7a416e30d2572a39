"""Leaves keys out of a plan until its graphs are estimated to fit a budget. Pure.

No batch loses its graph by that, on any ranks: the largest plain key of each family stays, and a
key goes only where every decision that replays it finds another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from cgprof.config.flags import spell
from cgprof.config.schema import MicrobatchConfig
from cgprof.errors import ConfigError
from cgprof.graphs.dispatch import choose
from cgprof.graphs.plan import CapturePlan, SkippedKey
from cgprof.microbatch.rule import last_microbatch_is_empty
from cgprof.microbatch.spread import can_spread
from cgprof.shapes import BatchShape, GraphKey
from cgprof.units import format_bytes

BytesOf = Callable[[Sequence[GraphKey]], int]


def trim(
    plan: CapturePlan,
    bytes_of: BytesOf,
    budget_bytes: int,
    microbatch: MicrobatchConfig,
    *,
    num_ranks: int = 1,
) -> CapturePlan:
    """Returns the plan without the keys that a budget has no room for; equal on every rank.

    Twins go first, then plain keys; of them each time the one whose batches would grow least, by
    the next larger key of its family. A twin without a larger one goes last: its batches run plain.

    Args:
        plan: All that would be captured.
        bytes_of: What keys take together, by estimate.
        budget_bytes: The most they may take.
        microbatch: When steps are split.
        num_ranks: How many ranks decide together.

    Raises:
        ConfigError: The keys that have to stay do not fit.
    """
    whole = bytes_of(plan.keys)
    rules = _Rules(microbatch, num_ranks)
    keys = list(plan.keys)
    gone: list[GraphKey] = []
    while (needed := bytes_of(keys)) > budget_bytes:
        key = rules.next_to_go(keys)
        if key is None:
            raise ConfigError(
                spell("capture.max_graph_memory_bytes"),
                f"{_exact(budget_bytes)} does not hold what has to stay ({_named(keys)}): that "
                f"takes {_exact(needed)} by estimate; raise it to that, or lower --max-num-seqs "
                "or --max-cudagraph-capture-size",
            )
        keys.remove(key)
        gone.append(key)
    if not gone:
        return plan
    cause = (
        f"left out to keep graph memory within {format_bytes(budget_bytes)} "
        f"(estimate with all {format_bytes(whole)})"
    )
    skipped = [
        SkippedKey(key=key, reason=f"{cause}: {_instead(key, keys)}", cause=cause)
        for key in plan.keys
        if key in gone
    ]
    return dataclasses.replace(plan, keys=tuple(keys), skipped=(*plan.skipped, *skipped))


class _Rules:
    """Which keys may go, and in which order."""

    def __init__(self, microbatch: MicrobatchConfig, num_ranks: int) -> None:
        self._microbatch = microbatch
        self._num_ranks = num_ranks

    def next_to_go(self, keys: Sequence[GraphKey]) -> GraphKey | None:
        """Returns the key to leave out next, or None if all have to stay."""
        twins = [key for key in keys if key.is_twin and self._twin_may_go(key, keys)]
        if twins:
            return min(twins, key=lambda key: _growth(key, keys))
        plain = [key for key in keys if not key.is_twin and self._plain_may_go(key, keys)]
        return min(plain, key=lambda key: _growth(key, keys), default=None)

    def _twin_may_go(self, twin: GraphKey, keys: Sequence[GraphKey]) -> bool:
        larger = _larger(twin, keys)
        if larger is None:
            return choose(_full(twin), keys) is not None
        if _companion(larger, keys) is not None:
            return True
        # Without a plain key of its size a refused twin is an eager step.
        return self._accepts(larger, self._fewest(twin, keys))

    def _plain_may_go(self, key: GraphKey, keys: Sequence[GraphKey]) -> bool:
        if _larger(key, keys) is None:
            return False
        if any(_companion(twin, keys) == key for twin in keys if twin.is_twin):
            return False
        # Ranks of unlike sizes refuse to split a step of mixed lengths; its exact size replays.
        split = self._microbatch
        fewest = max(split.prefill_token_threshold, split.num_microbatches)
        refusable = last_microbatch_is_empty(fewest, key.num_tokens, split.num_microbatches)
        mixed = key.uniform_query_len is None
        return not (split.enabled and self._num_ranks > 1 and mixed and refusable)

    def _fewest(self, twin: GraphKey, keys: Sequence[GraphKey]) -> int:
        """The fewest tokens of a rank whose step replays this twin, or is refused to its plain."""
        split = self._microbatch
        fewest = max(split.decode_token_threshold, split.num_microbatches)
        if self._num_ranks == 1:
            below = [key for key in _family(twin, keys) if key.num_tokens < twin.num_tokens]
            fewest = max(fewest, 1 + max((key.num_tokens for key in below), default=0))
        if _companion(twin, keys) is not None:
            return fewest
        while fewest < twin.num_tokens and not self._accepts(twin, fewest):
            fewest += 1
        return fewest

    def _accepts(self, twin: GraphKey, fewest: int) -> bool:
        count = twin.num_microbatches
        if not last_microbatch_is_empty(fewest, twin.num_tokens, count):
            return True
        spread = self._microbatch.spread_real_tokens
        return spread and can_spread(_full(twin), twin, fewest)


def _family(key: GraphKey, keys: Sequence[GraphKey]) -> list[GraphKey]:
    """Keys that the same batches choose among, `key` included if it is there."""

    def kind(one: GraphKey) -> tuple[object, ...]:
        return (one.mode, one.uniform_query_len, one.num_microbatches)

    return [one for one in keys if kind(one) == kind(key)]


def _larger(key: GraphKey, keys: Sequence[GraphKey]) -> GraphKey | None:
    """The next larger key of its family; it covers all that this one covers."""
    above = [one for one in _family(key, keys) if one != key and one.covers(_full(key))]
    return min(above, key=lambda one: one.num_tokens, default=None)


def _companion(twin: GraphKey, keys: Sequence[GraphKey]) -> GraphKey | None:
    """The plain key that a refused twin falls back to."""
    return choose(_full(twin), [key for key in keys if key.num_tokens == twin.num_tokens])


def _full(key: GraphKey) -> BatchShape:
    """The largest batch of a key; one of mixed lengths counts as a prefill."""
    num_reqs = key.num_reqs or key.num_tokens
    uniform = key.uniform_query_len
    return BatchShape(
        num_reqs=num_reqs,
        num_tokens=key.num_tokens,
        max_query_len=uniform or key.num_tokens - num_reqs + 1,
        num_prefills=0 if uniform else 1,
    )


def _growth(key: GraphKey, keys: Sequence[GraphKey]) -> tuple[float, int]:
    """How many times its batches grow without this key; the larger of two equal ones goes first."""
    larger = _larger(key, keys)
    grown = float("inf") if larger is None else larger.num_tokens / key.num_tokens
    return grown, -key.num_tokens


def _instead(key: GraphKey, kept: Sequence[GraphKey]) -> str:
    larger = _larger(key, kept)
    if larger is not None:
        return f"its batches pad to {larger}"
    return f"its batches run unsplit as {choose(_full(key), kept)}"


def _exact(num_bytes: int) -> str:
    return f"{format_bytes(num_bytes)} ({num_bytes} bytes)"


def _named(keys: Sequence[GraphKey]) -> str:
    rest = len(keys) - 1
    return f"{keys[0]} and {rest} more" if rest else str(keys[0])
