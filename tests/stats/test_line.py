import numpy as np
import pytest
from scipy import stats

from cgprof.stats.line import fit_line

POINTS = ((500, 4.1), (700, 5.2), (900, 5.9), (1300, 8.4), (1500, 9.0))


def test_line_and_its_interval_are_those_of_scipy():
    line = fit_line(POINTS)
    x, y = np.array(POINTS).T
    known = stats.linregress(x, y)
    assert line.slope == pytest.approx(known.slope)
    assert line.base == pytest.approx(known.intercept)
    assert line.slope_half_width == pytest.approx(stats.t.ppf(0.975, 3) * known.stderr)
    assert line.largest_residual == pytest.approx(
        np.abs(y - known.intercept - known.slope * x).max()
    )


def test_interval_of_a_further_point_covers_it_in_95_of_100_cases():
    rng = np.random.default_rng(5)
    inside = 0
    for _ in range(2000):
        y = 3 + 2 * np.array([1.0, 2.0, 4.0, 8.0, 12.0]) + rng.normal(0, 1, 5)
        value, half = fit_line(list(zip([1.0, 2.0, 4.0, 8.0, 12.0], y, strict=True))).at(10)
        inside += abs(value - (23 + rng.normal(0, 1))) <= half
    assert inside / 2000 == pytest.approx(0.95, abs=0.015)


def test_further_away_the_interval_is_wider():
    line = fit_line(POINTS)
    assert line.at(20_000)[1] > 3 * line.at(1000)[1]


def test_points_on_a_line_have_no_error():
    line = fit_line([(1, 3), (2, 5), (3, 7)])
    assert line.at(10) == pytest.approx((21, 0))


@pytest.mark.parametrize("points", [(), POINTS[:2], ((5, 1), (5, 2), (5, 3))])
def test_too_few_or_equal_points_have_no_line(points):
    assert fit_line(points) is None
