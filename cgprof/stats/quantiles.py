"""Order statistics of samples: what a summary keeps of a one-dimensional array of integers.

Robust figures only: launch times have long tails, which a mean and a deviation would follow.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntSamples = NDArray[np.int64]

MIN_SAMPLES_FOR_NOISE = 5
MIN_SAMPLES_FOR_P99 = 100
# Source: Iglewicz and Hoaglin, "How to Detect and Handle Outliers" (1993): 0.6745 and 3.5.
_SCORE_PER_MAD = 0.6745
_OUTLIER_SCORE = 3.5


def median(samples: IntSamples) -> int:
    """Returns the median, rounded to an integer; `samples` is not empty."""
    return round(float(np.median(samples)))


def interquartile_range(samples: IntSamples) -> int:
    """Returns the distance from the first to the third quartile, rounded."""
    low, high = np.percentile(samples, (25, 75))
    return round(float(high - low))


def percentile(samples: IntSamples, percent: int) -> int:
    """Returns the value that `percent` of 100 samples do not exceed, interpolated and rounded."""
    return round(float(np.percentile(samples, percent)))


def count_outliers(samples: IntSamples) -> int:
    """Returns how many samples lie far from the median, measured by the median deviation.

    A deviation of zero counts as one, the resolution of the samples.
    """
    distance = np.abs(samples - np.median(samples))
    deviation = max(float(np.median(distance)), 1.0)
    return int(np.count_nonzero(_SCORE_PER_MAD * distance / deviation > _OUTLIER_SCORE))


def relative_noise(samples: IntSamples) -> float | None:
    """Returns interquartile range over median, None below five samples or for a median of zero."""
    if samples.size < MIN_SAMPLES_FOR_NOISE:
        return None
    low, middle, high = np.percentile(samples, (25, 50, 75))
    return float((high - low) / middle) if middle else None
