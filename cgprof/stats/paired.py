"""Scores and pairs of scores: errors, intervals, tests, and which difference they could see."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom, norm

CONFIDENCE = 0.95
POWER = 0.80
ALPHA = 1 - CONFIDENCE
_NUM_RESAMPLES = 4000
_CHUNK_ELEMENTS = 1 << 22  # of one draw of resamples
_BISECTIONS = 16
_Z = float(norm.ppf(1 - ALPHA / 2))
_Z_POWER = float(norm.ppf(POWER))


def mcnemar_exact(only_a: int, only_b: int) -> float:
    """Returns the two-sided p-value of a paired table from its discordant counts.

    Args:
        only_a: Items that A alone has right.
        only_b: Items that B alone has right.

    Source: McNemar (1947), in its exact binomial form.
    """
    discordant = only_a + only_b
    if not discordant:
        return 1.0
    return min(1.0, 2.0 * float(binom.cdf(min(only_a, only_b), discordant, 0.5)))


def paired_bootstrap(differences: NDArray[np.float64], seed: int) -> tuple[float, float, float]:
    """Returns the mean of paired differences [n] and its 95 % percentile interval; n is not 0.

    Source: Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), percentile interval.
    """
    count = differences.size
    rng = np.random.default_rng(seed)
    chunk = max(1, _CHUNK_ELEMENTS // count)
    means = [
        differences[rng.integers(0, count, (min(chunk, _NUM_RESAMPLES - done), count))].mean(axis=1)
        for done in range(0, _NUM_RESAMPLES, chunk)
    ]
    tail = 100.0 * ALPHA / 2
    low, high = np.percentile(np.concatenate(means), (tail, 100.0 - tail))
    return float(differences.mean()), float(low), float(high)


def wilson_interval(correct: int, total: int) -> tuple[float, float]:
    """Returns the 95 % interval of a proportion; `total` is not 0.

    Source: Wilson, "Probable inference, the law of succession, and statistical inference" (1927).
    """
    share, z2 = correct / total, _Z**2
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2)) / (1 + z2 / total)
    low = 0.0 if not correct else max(0.0, centre - half)
    return low, 1.0 if correct == total else min(1.0, centre + half)


def proportion_error(share: float, total: int) -> float:
    """Returns the standard error of a proportion over `total` items."""
    return math.sqrt(share * (1 - share) / total)


def ratio_of_sums(
    above: NDArray[np.float64], below: NDArray[np.float64]
) -> tuple[float, float | None]:
    """Returns sum over sum of items [n] and its standard error, None for a single item.

    Source: Cochran, "Sampling Techniques" (1977), the variance of a ratio estimate.
    """
    ratio = float(above.sum() / below.sum())
    count = above.size
    if count < 2:
        return ratio, None
    spread = float(((above - ratio * below) ** 2).sum()) * count / (count - 1)
    return ratio, math.sqrt(spread) / float(below.sum())


def mean_interval(mean: float, error: float) -> tuple[float, float]:
    """Returns the 95 % interval of a mean with this standard error."""
    return mean - _Z * error, mean + _Z * error


def unpaired_p(delta: float, error_a: float, error_b: float) -> float:
    """Returns the two-sided p-value of a difference of two independent means with these errors."""
    error = math.hypot(error_a, error_b)
    if not error:
        return 1.0 if not delta else 0.0
    return float(2 * norm.sf(abs(delta) / error))


def detectable_difference(error: float) -> float:
    """Returns the true difference of means that is found with 80 % power, given its error."""
    return (_Z + _Z_POWER) * error


def detectable_unpaired(share: float, total_a: int, total_b: int) -> float:
    """Returns the difference of two independent proportions near `share` found with 80 % power."""
    errors = proportion_error(share, total_a), proportion_error(share, total_b)
    return detectable_difference(math.hypot(*errors))


def detectable_paired(discordant: int, total: int) -> float | None:
    """Returns the true difference that the exact paired test finds with 80 % power, or None.

    Items are taken to differ as often as was seen, more often only where the difference needs it.
    None when not even a difference of every item would be found.
    """
    background = discordant / total
    counts = np.arange(1, total + 1)
    # Largest minority [n] whose two-sided p-value is below alpha, -1 where there is none.
    minority = np.asarray(binom.ppf(ALPHA / 2, counts, 0.5), np.float64) - 1
    minority += 2 * binom.cdf(minority + 1, counts, 0.5) < ALPHA

    def power(delta: float) -> float:
        discordance = max(background, delta)
        share = (1 + delta / discordance) / 2
        found = binom.cdf(minority, counts, share) + binom.cdf(minority, counts, 1 - share)
        return float((binom.pmf(counts, total, discordance) * found).sum())

    if power(1.0) < POWER:
        return None
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if power(middle) >= POWER else (middle, high)
    return high
