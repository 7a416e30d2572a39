"""The median of a few samples with its interval, whatever their distribution."""

from __future__ import annotations

import numpy as np
from scipy.stats import binom

from cgprof.stats.quantiles import IntSamples

_TAIL = 0.025


def median_interval(samples: IntSamples) -> tuple[float, float, float]:
    """Returns the median and the order statistics that hold the true one in 95 % of cases.

    Below six samples no two of them do; then it is the smallest and the largest. `samples` is not
    empty.

    Source: Conover, "Practical Nonparametric Statistics" (1999), section 3.2.
    """
    ordered = np.sort(samples)
    rank = max(1, int(binom.ppf(_TAIL, ordered.size, 0.5)))
    return float(np.median(ordered)), float(ordered[rank - 1]), float(ordered[-rank])
