"""The nouns of a step: its shape, the key it runs as, one rank's vote and all ranks' decision.

Values only: no torch, no device. Letters used for tensor shapes all over the project:
`T` tokens padded, `R` requests padded, `D` hidden, `H` query heads, `G` KV heads, `C` head dim,
`E` experts, `L` experts on this rank, `K` experts per token, `N` blocks per request,
`S` slots per block, `F` FFN width, `V` vocabulary, `M` microbatches, `P` ranks of the group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum, StrEnum


class RuntimeMode(IntEnum):
    """How one step runs. The order NONE < PIECEWISE < FULL matters: ranks agree on the minimum."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2


class CapturePolicy(StrEnum):
    """What a run captures, in vLLM's words."""

    NONE = "none"
    PIECEWISE = "piecewise"
    FULL = "full"
    FULL_DECODE_ONLY = "full-decode-only"
    FULL_AND_PIECEWISE = "full-and-piecewise"

    @property
    def decode_mode(self) -> RuntimeMode:
        """The mode of uniform decode steps under this policy."""
        return _POLICY_MODES[self][0]

    @property
    def mixed_mode(self) -> RuntimeMode:
        """The mode of all other steps under this policy."""
        return _POLICY_MODES[self][1]

    @property
    def separates_decode(self) -> bool:
        """Whether decode steps have keys of their own."""
        return self in (CapturePolicy.FULL_DECODE_ONLY, CapturePolicy.FULL_AND_PIECEWISE)


_POLICY_MODES = {
    CapturePolicy.NONE: (RuntimeMode.NONE, RuntimeMode.NONE),
    CapturePolicy.PIECEWISE: (RuntimeMode.PIECEWISE, RuntimeMode.PIECEWISE),
    CapturePolicy.FULL: (RuntimeMode.FULL, RuntimeMode.FULL),
    CapturePolicy.FULL_DECODE_ONLY: (RuntimeMode.FULL, RuntimeMode.NONE),
    CapturePolicy.FULL_AND_PIECEWISE: (RuntimeMode.FULL, RuntimeMode.PIECEWISE),
}


class GraphSupport(IntEnum):
    """Which batches an attention backend may run inside a full graph."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


class DecisionReason(StrEnum):
    """Why a step runs as it does."""

    GRAPH = "graph"
    NO_FIT = "no-fit"
    RANK_EAGER = "rank-eager"
    EMPTY_MICROBATCH = "empty-microbatch"
    IDLE = "idle"
    SPREAD = "spread"


class VetoReason(StrEnum):
    """Why one rank kept all ranks from splitting a step."""

    IDLE = "idle"
    BELOW_THRESHOLD = "below-threshold"
    NOT_UNIFORM = "not-uniform"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """One rank's batch before padding."""

    num_reqs: int
    num_tokens: int
    max_query_len: int
    num_prefills: int = 0

    @property
    def uniform_query_len(self) -> int | None:
        """The query length that all requests share, or None; a prompt chunk is never uniform."""
        if self.num_prefills or not self.num_reqs:
            return None
        uniform = self.num_tokens == self.num_reqs * self.max_query_len
        return self.max_query_len if uniform else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphKey:
    """A padded shape and how it runs: capture list entry, dictionary key and dispatch answer.

    `num_reqs` None: requests are not padded. `uniform_query_len` None: any mix fits.
    """

    mode: RuntimeMode
    num_tokens: int
    num_reqs: int | None = None
    uniform_query_len: int | None = None
    num_microbatches: int = 1

    def covers(self, shape: BatchShape) -> bool:
        """Whether a batch of this shape, padded, fits this key; an idle rank's fits any."""
        return not shape.num_tokens or (
            shape.num_tokens <= self.num_tokens
            and (self.num_reqs is None or shape.num_reqs <= self.num_reqs)
            and (
                self.uniform_query_len is None or shape.uniform_query_len == self.uniform_query_len
            )
        )

    @property
    def is_twin(self) -> bool:
        """Whether this is a graph of several microbatches."""
        return self.mode is not RuntimeMode.NONE and self.num_microbatches > 1

    def plain_among(self, keys: Collection[GraphKey]) -> GraphKey | None:
        """The plain key of this size: of the same query length, else of any lengths."""
        alike = dataclasses.replace(self, num_microbatches=1)
        of_any = dataclasses.replace(alike, uniform_query_len=None)
        return next((key for key in (alike, of_any) if key in keys), None)

    def as_eager(self) -> GraphKey:
        """The same padding and split, run without a graph."""
        return dataclasses.replace(self, mode=RuntimeMode.NONE)

    def __str__(self) -> str:
        """A short name that is unique among the keys of a plan, such as `FULL-256x256q1-mb2`."""
        reqs = "" if self.num_reqs is None else f"x{self.num_reqs}"
        uniform = "" if self.uniform_query_len is None else f"q{self.uniform_query_len}"
        microbatches = "" if self.num_microbatches == 1 else f"-mb{self.num_microbatches}"
        return f"{self.mode.name}-{self.num_tokens}{reqs}{uniform}{microbatches}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVote:
    """What one rank would do alone."""

    shape: BatchShape
    mode: RuntimeMode
    wants_microbatch: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDecision:
    """What all ranks do. Every field is equal on every rank, always.

    An eager step has a key of mode NONE whose `num_tokens` is the maximum over ranks.
    """

    key: GraphKey
    tokens_per_rank: tuple[int, ...]
    reason: DecisionReason
