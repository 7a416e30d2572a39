"""Looks for a load over which ranks would decide differently, or split into nothing. Pure.

Each rank decides with the captured keys in an order of its own, as real ranks may hold them. What
is checked of a decision is computed here, not asked of the rule that made it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from cgprof.config.schema import Limits, MicrobatchConfig
from cgprof.graphs.dispatch import decide, vote
from cgprof.graphs.explain import load_shape, microbatch_loads
from cgprof.shapes import (
    BatchShape,
    DecisionReason,
    GraphKey,
    RuntimeMode,
    StepDecision,
    StepVote,
)

Rule = Callable[[int, Sequence[StepVote], Collection[GraphKey], MicrobatchConfig], StepDecision]

MOST_LISTED = 70_000  # decode load vectors; of more than these, some are drawn
DRAWN_DECODES = 20_000
DRAWN_MIXED = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpace:
    """Loads of one kind that a search looked at: how many of how many."""

    loads: str
    possible: int | None  # None: too many to count
    looked_at: int
    is_exhaustive: bool  # all were listed, in order; otherwise drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The first load vector over which the rule fails, and how."""

    shapes: tuple[BatchShape, ...]
    problem: str
    decisions: tuple[StepDecision, ...]  # one a rank


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What was looked at, and what was found, if anything."""

    num_ranks: int
    spaces: tuple[LoadSpace, ...]
    finding: Finding | None

    @property
    def looked_at(self) -> int:
        """Load vectors in all."""
        return sum(space.looked_at for space in self.spaces)


def as_built(
    rank: int, votes: Sequence[StepVote], keys: Collection[GraphKey], config: MicrobatchConfig
) -> StepDecision:
    """Decides as the engine does: the rank's own number plays no part."""
    return decide(votes, keys, config)


def search(
    keys: Sequence[GraphKey],
    limits: Limits,
    config: MicrobatchConfig,
    *,
    num_ranks: int,
    seed: int,
    rule: Rule = as_built,
) -> SearchResult:
    """Looks at all decode loads, or at many drawn ones, then at drawn loads with prompt chunks."""
    ladder = _Ladder(keys, limits, config)
    draw = random.Random(seed)
    possible = (limits.max_num_seqs + 1) ** num_ranks
    decodes = range(limits.max_num_seqs + 1)
    every = possible <= MOST_LISTED
    parts: list[tuple[str, int | None, Iterator[tuple[BatchShape, ...]]]] = [
        (
            "decode loads",
            possible,
            (
                tuple(map(load_shape, loads))
                for loads in itertools.product(decodes, repeat=num_ranks)
            )
            if every
            else _drawn(DRAWN_DECODES, num_ranks, lambda: load_shape(ladder.draw_decode(draw))),
        ),
        (
            "loads with prompt chunks",
            None,
            _drawn(DRAWN_MIXED, num_ranks, lambda: ladder.draw_mixed(draw)),
        ),
    ]
    spaces: list[LoadSpace] = []
    checker = _Checker(keys, config, num_ranks, rule)
    for loads, count, vectors in parts:
        looked_at, finding = checker.first_failure(vectors)
        spaces.append(
            LoadSpace(
                loads=loads,
                possible=count,
                looked_at=looked_at,
                is_exhaustive=count is not None and count <= MOST_LISTED,
            )
        )
        if finding is not None:
            return SearchResult(num_ranks=num_ranks, spaces=tuple(spaces), finding=finding)
    return SearchResult(num_ranks=num_ranks, spaces=tuple(spaces), finding=None)


class _Checker:
    def __init__(
        self, keys: Sequence[GraphKey], config: MicrobatchConfig, num_ranks: int, rule: Rule
    ) -> None:
        self._config = config
        self._rule = rule
        self._keys = frozenset(keys)
        # Sets of keys have no order that two processes share.
        self._orders = [_rotated(keys, rank) for rank in range(num_ranks)]
        self._votes: dict[tuple[int, BatchShape], StepVote] = {}

    def first_failure(
        self, vectors: Iterator[tuple[BatchShape, ...]]
    ) -> tuple[int, Finding | None]:
        looked_at = 0
        for shapes in vectors:
            looked_at += 1
            votes = [self._vote(rank, shape) for rank, shape in enumerate(shapes)]
            decisions = tuple(
                self._rule(rank, votes, keys, self._config)
                for rank, keys in enumerate(self._orders)
            )
            problem = self._problem(shapes, decisions)
            if problem:
                return looked_at, Finding(shapes=shapes, problem=problem, decisions=decisions)
        return looked_at, None

    def _vote(self, rank: int, shape: BatchShape) -> StepVote:
        found = self._votes.get((rank, shape))
        if found is None:
            found = self._votes[rank, shape] = vote(shape, self._orders[rank], self._config)
        return found

    def _problem(self, shapes: Sequence[BatchShape], decisions: Sequence[StepDecision]) -> str:
        decision = decisions[0]
        for rank, other in enumerate(decisions):
            if other != decision:
                return f"rank 0 decides {_say(decision)} and rank {rank} {_say(other)}"
        key = decision.key
        if key.mode is not RuntimeMode.NONE and key not in self._keys:
            return f"{key} was decided and is no captured key"
        spread = decision.reason is DecisionReason.SPREAD
        if spread and not (self._config.spread_real_tokens and key.is_twin):
            return f"{_say(decision)} spreads, which no setting or twin allows"
        for rank, shape in enumerate(shapes):
            if spread and shape.uniform_query_len != 1:
                return f"rank {rank}: its batch is spread, and not of one token a request"
            if shape.num_tokens and not key.covers(shape):
                return f"rank {rank}: its batch does not fit {key}"
            if key.num_microbatches > 1:
                loads = microbatch_loads(
                    shape.num_tokens, key.num_tokens, key.num_microbatches, spread=spread
                )
                if 0 in loads:
                    index = loads.index(0)
                    return f"rank {rank}: microbatch {index} of {key} has no token ({loads})"
        return ""


class _Ladder:
    """Draws loads; half of them near where a decision may change."""

    def __init__(self, keys: Sequence[GraphKey], limits: Limits, config: MicrobatchConfig) -> None:
        count = config.num_microbatches
        sizes = {key.num_tokens for key in keys} | {limits.max_num_seqs}
        marks = sizes | {size // count * (count - 1) for size in sizes}
        marks |= {0, count, config.decode_token_threshold, config.prefill_token_threshold}
        edges = sorted({mark + step for mark in marks for step in (-1, 0, 1)})
        self._limits = limits
        self._decodes = [edge for edge in edges if 0 <= edge <= limits.max_num_seqs]
        self._chunks = [edge for edge in edges if 0 < edge <= limits.max_num_batched_tokens]

    def draw_decode(self, draw: random.Random) -> int:
        if draw.random() < 0.5:
            return draw.choice(self._decodes)
        return draw.randint(0, self._limits.max_num_seqs)

    def draw_mixed(self, draw: random.Random) -> BatchShape:
        """A rank that is idle, decodes, takes in a prompt chunk, or does both."""
        decodes, takes_in = draw.random() < 0.5, draw.random() < 0.5
        most = self._limits.max_num_seqs - takes_in
        tokens = min(self.draw_decode(draw), most) if decodes else 0
        room = self._limits.max_num_batched_tokens - tokens
        if not takes_in or not room:
            return load_shape(tokens)
        near = draw.choice([edge for edge in self._chunks if edge <= room])
        chunk = near if draw.random() < 0.5 else draw.randint(1, room)
        return load_shape(tokens, prefill_tokens=chunk)


def _drawn(
    count: int, num_ranks: int, one: Callable[[], BatchShape]
) -> Iterator[tuple[BatchShape, ...]]:
    for _ in range(count):
        yield tuple(one() for _ in range(num_ranks))


def _rotated(keys: Sequence[GraphKey], rank: int) -> tuple[GraphKey, ...]:
    by = rank % len(keys) if keys else 0
    return (*keys[by:], *keys[:by])


def _say(decision: StepDecision) -> str:
    return f"{decision.key} ({decision.reason.value})"
