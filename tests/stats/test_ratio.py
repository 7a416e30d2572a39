import numpy as np
import pytest
import scipy.stats

from cgprof.stats.ratio import ratio_of_medians


def _draw(seed, centre, count):
    rng = np.random.default_rng(seed)
    return (centre * rng.lognormal(0, 0.2, count)).astype(np.int64)


def test_ratio_agrees_with_scipy_bootstrap():
    above, below = _draw(1, 40_000, 60), _draw(2, 10_000, 45)
    ratio, low, high = ratio_of_medians(above, below, seed=0)

    def statistic(x, y, axis):
        return np.median(x, axis=axis) / np.median(y, axis=axis)

    known = scipy.stats.bootstrap(
        (above, below), statistic, method="percentile", n_resamples=4000, rng=1
    ).confidence_interval
    assert ratio == np.median(above) / np.median(below)
    assert low == pytest.approx(known.low, rel=0.03)
    assert high == pytest.approx(known.high, rel=0.03)


def test_ratio_interval_covers_the_truth_about_as_often_as_it_says():
    covered = 0
    for seed in range(100):
        _, low, high = ratio_of_medians(_draw(seed, 30_000, 40), _draw(seed + 500, 10_000, 40), 0)
        covered += low <= 3.0 <= high
    assert 88 <= covered <= 100


def test_ratio_is_the_same_for_the_same_seed_and_another_for_another():
    above, below = _draw(1, 900, 31), _draw(2, 300, 31)
    assert ratio_of_medians(above, below, 5) == ratio_of_medians(above, below, 5)
    assert ratio_of_medians(above, below, 5) != ratio_of_medians(above, below, 6)


@pytest.mark.parametrize(
    ("above", "below"), [([], [1]), ([1], []), ([1, 2], [0, 0]), ([5, 5, 5], [0, 0, 9, 9, 9])]
)
def test_ratio_that_cannot_be_told_is_none(above, below):
    assert ratio_of_medians(np.array(above, np.int64), np.array(below, np.int64), 0) is None
