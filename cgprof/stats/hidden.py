"""The share of an exchange that a split step hides, from the steps' own samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cgprof.stats.quantiles import IntSamples

_NUM_RESAMPLES = 2000
_TAILS_PERCENT = (2.5, 97.5)


def hidden_share(
    plain: IntSamples,
    plain_bare: IntSamples,
    split: IntSamples,
    split_bare: IntSamples,
    seed: int,
) -> tuple[float, float, float] | None:
    """Returns 1 - (split - split_bare) / (plain - plain_bare) of medians, and its 95 % interval.

    The four arrays are resampled apart. None when the exchange of a plain step cannot be told
    from zero: the interval of the divisor reaches down to it.

    Source: Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), percentile interval.
    """
    series = (plain, plain_bare, split, split_bare)
    if not all(samples.size for samples in series):
        return None
    rng = np.random.default_rng(seed)
    resampled = [_resampled_medians(rng, samples) for samples in series]
    exchange, exposed = resampled[0] - resampled[1], resampled[2] - resampled[3]
    if np.percentile(exchange, _TAILS_PERCENT[0]) <= 0:
        return None
    whole = float(np.median(plain) - np.median(plain_bare))
    rest = float(np.median(split) - np.median(split_bare))
    if whole <= 0:
        return None
    shares = 1 - exposed[exchange > 0] / exchange[exchange > 0]
    low, high = np.percentile(shares, _TAILS_PERCENT)
    return 1 - rest / whole, float(low), float(high)


def _resampled_medians(rng: np.random.Generator, samples: IntSamples) -> NDArray[np.float64]:
    drawn = samples[rng.integers(0, samples.size, (_NUM_RESAMPLES, samples.size))]
    medians: NDArray[np.float64] = np.median(drawn, axis=1)
    return medians
