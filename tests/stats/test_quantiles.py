import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from cgprof.stats.quantiles import (
    count_outliers,
    interquartile_range,
    median,
    percentile,
    relative_noise,
)

samples = arrays(np.int64, st.integers(1, 60), elements=st.integers(0, 10**10))


@settings(deadline=None)
@given(samples)
def test_quantiles_agree_with_scipy(values):
    assert median(values) == round(float(scipy.stats.quantile(values.astype(float), 0.5)))
    assert abs(interquartile_range(values) - scipy.stats.iqr(values)) <= 0.5
    for percent in (90, 95, 99):
        expected = scipy.stats.scoreatpercentile(values, percent)
        assert abs(percentile(values, percent) - expected) <= 0.5 + 1e-6


@given(samples)
def test_outliers_agree_with_scipy_deviation(values):
    deviation = scipy.stats.median_abs_deviation(values)
    expected = sum(
        0.6745 * abs(value - np.median(values)) / max(deviation, 1) > 3.5 for value in values
    )
    assert count_outliers(values) == expected


def test_outliers_counts_only_the_far_ones():
    values = np.array([100, 101, 99, 100, 102, 98, 100, 500, 900], np.int64)
    assert count_outliers(values) == 2


def test_outliers_of_equal_samples_are_none_and_a_jump_is_one():
    assert count_outliers(np.full(20, 7, np.int64)) == 0
    assert count_outliers(np.array([7] * 20 + [5000], np.int64)) == 1


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([10, 20, 30, 40], None),  # too few
        ([0, 0, 0, 0, 0], None),  # no median to divide by
        ([100, 100, 100, 100, 100], 0.0),
        ([80, 90, 100, 110, 120], 0.2),
    ],
)
def test_relative_noise_is_quartile_distance_over_median(values, expected):
    assert relative_noise(np.array(values, np.int64)) == expected
