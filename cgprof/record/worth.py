"""Whether splitting pays: the times of whole steps, plain and split, and what follows from them."""

from __future__ import annotations

from typing import Literal

from cgprof.record.strict import NonNegative, Record

Verdict = Literal["worth it", "not worth it", "undecided"]


class StepTimes(Record):
    """Steps of one kind: the slowest rank's time of each, from the decision to the tokens."""

    count: NonNegative
    median_ns: NonNegative
    iqr_ns: NonNegative


class Estimate(Record):
    """A number from samples and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


class WorthRow(Record):
    """One token count a rank. `bare` steps leave out the exchange and nothing else.

    A row of `spread` has a rank with too few tokens: `plain` is what such a step falls back to,
    `split` the twin over whose microbatches those tokens are spread.
    """

    kind: Literal["decode", "prefill", "spread"]
    num_tokens: NonNegative  # of the fullest rank
    fewest_tokens: NonNegative | None = None  # of the smallest rank; None: all have num_tokens
    plain_label: str
    split_label: str
    plain: StepTimes
    split: StepTimes
    plain_bare: StepTimes | None = None
    split_bare: StepTimes | None = None
    bare_note: str = ""  # why there are no bare steps
    exchange_ns: int | None = None  # plain - plain bare
    exposed_ns: int | None = None  # split - split bare
    hidden: Estimate | None = None  # 1 - exposed / exchange
    hidden_note: str = ""  # why there is no hidden share
    experts_plain_ns: NonNegative | None = None  # device time of the expert matmuls of a step
    experts_split_ns: NonNegative | None = None
    experts_note: str = ""  # why they are missing
    speedup: Estimate | None = None  # plain / split
    verdict: Verdict = "undecided"


class WorthRecord(Record):
    """Whether dual batch overlap is worth it, for the run's exchange."""

    exchange: str  # the run's all2all backend, or "loopback"
    num_ranks: NonNegative
    rows: tuple[WorthRow, ...] = ()
    notes: tuple[str, ...] = ()  # what was left out, and why
    process_id: NonNegative | None = None
