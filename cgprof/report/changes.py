"""How much one figure of a key changed between two runs, and whether the change counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cgprof.report.layout import ratio
from cgprof.stats.pace import MOST_SLOWER
from cgprof.stats.ratio import ratio_of_medians

Verdict = Literal["same", "improved", "regression", "inconclusive"]
SMALLEST_CHANGE = 0.05
_MIN_SAMPLES = 5  # below, an interval says nothing
_SEED = 0
RULE = (
    "a change counts only if the 95 % bootstrap interval of the ratio of medians excludes 1 and "
    "the median moves by more than 5 %",
    "same: the interval lies within 5 % of 1, or excludes 1 while the median moves by 5 % or less, "
    "or the samples are identical; all else is inconclusive",
)
LAUNCH_RULES: dict[str, str] = {
    "cuda": "an interval covers one burst of samples, not what moves between bursts: a launch "
    "change counts only if replay and round robin both count in one direction, and the host's own "
    f"pace did not change that way by over {MOST_SLOWER:g} times; else inconclusive",
    "tape": "launch times of a tape are stand-ins on a shared CPU, and an interval covers one "
    "burst of samples only: a launch change is inconclusive at most",
}
ORDER: tuple[Verdict, ...] = ("regression", "inconclusive", "improved", "same")
ORDER_RULE = f"the whole is the first found of: {', '.join(ORDER)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Medians of both runs, B over A, and the interval of that ratio where there are samples."""

    a_ns: int | None
    b_ns: int | None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def reason(self) -> str | None:
        """Why there is no ratio, or no interval of it; None where both are there."""
        for name, median_ns in (("A", self.a_ns), ("B", self.b_ns)):
            if median_ns is None:
                return f"not measured in {name}"
        if self.ratio is None:
            return "the median of A is zero"
        return "too few samples for an interval" if self.low is None else None

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
    Identical samples have not changed, however few or small they are.
    """
    if a.size and a_ns == b_ns and np.array_equal(a, b):
        return Change(a_ns=a_ns, b_ns=b_ns, ratio=1.0, low=1.0, high=1.0)
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
    """Returns the verdict of a whole: the first in `ORDER`; no verdict is inconclusive."""
    found = set(verdicts)
    return next((verdict for verdict in ORDER if verdict in found), "inconclusive")


def launch_verdict(
    recorder: str, hot: Verdict | None, turns: Verdict | None, host_ratio: float | None = None
) -> Verdict | None:
    """Returns what the launch times of a key say together: hot replay, and keys in turn.

    `host_ratio` is what a fixed loop of Python took beside the key, B over A, None where it was
    not timed. None when neither was measured in either run.
    """
    found = {verdict for verdict in (hot, turns) if verdict is not None}
    if not found:
        return None
    if found == {"same"}:
        return "same"
    counts = recorder == "cuda" and hot == turns and not _is_the_hosts(hot, host_ratio)
    return hot if counts else "inconclusive"


def _is_the_hosts(verdict: Verdict | None, host_ratio: float | None) -> bool:
    """Whether the host itself changed its pace the way that the launch changed."""
    if host_ratio is None:
        return False
    slower, faster = host_ratio > MOST_SLOWER, host_ratio < 1 / MOST_SLOWER
    return (verdict == "regression" and slower) or (verdict == "improved" and faster)
