"""The ratio of two medians with its interval, from the samples themselves."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cgprof.stats.quantiles import IntSamples

_NUM_RESAMPLES = 2000
_CONFIDENCE_PERCENT = 95.0


def ratio_of_medians(
    numerator: IntSamples, denominator: IntSamples, seed: int
) -> tuple[float, float, float] | None:
    """Returns median over median and the bounds of its 95 % bootstrap interval.

    The two arrays are resampled apart, hence need not be paired or of one length. None when a
    side is empty or a median of the denominator can be zero: there is no ratio then.

    Source: Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), percentile interval.
    """
    if not numerator.size or not denominator.size or not np.median(denominator):
        return None
    rng = np.random.default_rng(seed)
    above, below = _resampled_medians(rng, numerator), _resampled_medians(rng, denominator)
    if not below.all():
        return None
    tail = (100.0 - _CONFIDENCE_PERCENT) / 2
    low, high = np.percentile(above / below, (tail, 100.0 - tail))
    return float(np.median(numerator) / np.median(denominator)), float(low), float(high)


def _resampled_medians(rng: np.random.Generator, samples: IntSamples) -> NDArray[np.float64]:
    drawn = samples[rng.integers(0, samples.size, (_NUM_RESAMPLES, samples.size))]
    medians: NDArray[np.float64] = np.median(drawn, axis=1)
    return medians
