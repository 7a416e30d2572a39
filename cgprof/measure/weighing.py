"""What follows from the times of steps plain and split, with and without their exchange. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cgprof.measure.worth_cases import WorthCase
from cgprof.record.worth import Estimate, StepTimes, Verdict, WorthRow
from cgprof.stats.hidden import hidden_share
from cgprof.stats.quantiles import IntSamples, interquartile_range, median
from cgprof.stats.ratio import ratio_of_medians

IN_NOISE = "the exchange of a plain step cannot be told from noise"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSamples:
    """Samples [n] of whole steps; the bare ones leave out the exchange, None if not measured."""

    plain: IntSamples
    split: IntSamples
    plain_bare: IntSamples | None = None
    split_bare: IntSamples | None = None
    bare_note: str = ""


def slowest(of_ranks: Sequence[IntSamples]) -> IntSamples:
    """Returns each step's time on the rank that took longest; all ranks ran the same steps."""
    longest: IntSamples = np.stack(of_ranks).max(axis=0)
    return longest


def weigh(case: WorthCase, samples: StepSamples, seed: int) -> WorthRow:
    """Returns the row of one case, with everything that follows from the samples."""
    plain, split = samples.plain, samples.split
    bare_plain, bare_split = samples.plain_bare, samples.split_bare
    speedup = _estimate(ratio_of_medians(plain, split, seed))
    row = WorthRow(
        kind=case.kind,
        num_tokens=case.num_tokens,
        fewest_tokens=min(case.tokens_per_rank, default=None),
        plain_label=str(case.plain),
        split_label=str(case.split),
        plain=_times(plain),
        split=_times(split),
        bare_note=samples.bare_note,
        hidden_note=samples.bare_note,
        speedup=speedup,
        verdict=_verdict(speedup),
    )
    if bare_plain is None or bare_split is None:
        return row
    hidden = _estimate(hidden_share(plain, bare_plain, split, bare_split, seed))
    return row.model_copy(
        update={
            "plain_bare": _times(bare_plain),
            "split_bare": _times(bare_split),
            "exchange_ns": median(plain) - median(bare_plain),
            "exposed_ns": median(split) - median(bare_split),
            "hidden": hidden,
            "hidden_note": IN_NOISE if hidden is None else "",
        }
    )


def _verdict(speedup: Estimate | None) -> Verdict:
    if speedup is not None and speedup.low > 1:
        return "worth it"
    if speedup is not None and speedup.high < 1:
        return "not worth it"
    return "undecided"


def _times(samples: IntSamples) -> StepTimes:
    return StepTimes(
        count=samples.size, median_ns=median(samples), iqr_ns=interquartile_range(samples)
    )


def _estimate(found: tuple[float, float, float] | None) -> Estimate | None:
    if found is None:
        return None
    value, low, high = found
    return Estimate(value=value, low=low, high=high)
