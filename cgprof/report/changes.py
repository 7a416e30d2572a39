"""How much one figure of a key changed between two runs, and whether the change counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cgprof.report.layout import ratio
from cgprof.stats.ratio import ratio_of_medians

Verdict = Literal["same", "improved", "regression", "inconclusive"]
SMALLEST_CHANGE = 0.05
_MIN_SAMPLES = 5  # below, an interval says nothing
_SEED = 0
RULE = (
    "a change counts only if the 95 % bootstrap interval of the ratio of medians excludes 1 and "
    "the median moves by more than 5 %",
    "same: the interval lies within 5 % of 1, or excludes 1 while the median moves by 5 % or less; "
    "all else is inconclusive",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Medians of both runs, B over A, and the interval of that ratio where there are samples."""

    a_ns: int | None
    b_ns: int | None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def verdict(self) -> Verdict | None:
        """None when neither run has the figure."""
        if self.a_ns is None and self.b_ns is None:
            return None
        if self.ratio is None or self.low is None or self.high is None:
            return "inconclusive"
        excludes_one = self.low > 1 or self.high < 1
        if excludes_one and abs(self.ratio - 1) > SMALLEST_CHANGE:
            return "regression" if self.ratio > 1 else "improved"
        within = self.low >= 1 - SMALLEST_CHANGE and self.high <= 1 + SMALLEST_CHANGE
        return "same" if excludes_one or within else "inconclusive"


def change_of(
    a_ns: int | None, b_ns: int | None, a: NDArray[np.int64], b: NDArray[np.int64]
) -> Change:
    """Returns the change from the medians of the records and the samples [n] behind them.

    A median of zero in A leaves no ratio, too few samples leave a ratio without an interval.
    """
    found = None
    if min(a.size, b.size) >= _MIN_SAMPLES:
        found = ratio_of_medians(b, a, _SEED)
    if found is None or a_ns is None or b_ns is None:
        return Change(a_ns=a_ns, b_ns=b_ns, ratio=ratio(b_ns, a_ns))
    middle, low, high = found
    return Change(a_ns=a_ns, b_ns=b_ns, ratio=middle, low=low, high=high)


def samples_of(frame: pd.DataFrame, label: str, phase: str, column: str) -> NDArray[np.int64]:
    """Returns one column [n] of a key's samples in one phase; what was not measured is left out."""
    rows = frame.loc[(frame["key"] == label) & (frame["phase"] == phase), column]
    return rows.dropna().to_numpy(dtype=np.int64)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Returns the verdict of a whole: a regression outweighs all, no verdict is inconclusive."""
    found = set(verdicts)
    order: tuple[Verdict, ...] = ("regression", "improved", "inconclusive", "same")
    return next((verdict for verdict in order if verdict in found), "inconclusive")
