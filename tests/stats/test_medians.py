import numpy as np
import pytest

from cgprof.stats.medians import median_interval


def test_bounds_are_the_order_statistics_of_the_table():
    """Conover's table for 20 samples: the sixth and the fifteenth."""
    samples = np.random.default_rng(0).permutation(np.arange(1, 21))
    assert median_interval(samples) == (10.5, 6.0, 15.0)
    assert median_interval(np.array([3, 1, 2])) == (2.0, 1.0, 3.0)
    assert median_interval(np.array([7])) == (7.0, 7.0, 7.0)


@pytest.mark.parametrize("count", [6, 24, 25, 60])
def test_interval_holds_the_true_median_of_a_skewed_law_in_95_of_100_cases(count):
    rng = np.random.default_rng(count)
    truth, held, cases = 1e4 * np.log(2), 0, 2000
    for samples in rng.exponential(1e4, (cases, count)):
        _, low, high = median_interval(samples.astype(np.int64))
        held += low <= truth <= high
    assert 0.94 <= held / cases <= 0.99
