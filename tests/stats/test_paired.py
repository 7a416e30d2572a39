import numpy as np
import pytest
from scipy.stats import binomtest

from cgprof.stats.paired import (
    detectable_paired,
    detectable_unpaired,
    mcnemar_exact,
    paired_bootstrap,
    proportion_error,
    unpaired_p,
    wilson_interval,
)


def test_mcnemar_equals_scipy_over_all_small_tables():
    for only_a in range(26):
        for only_b in range(26):
            total = only_a + only_b
            expected = binomtest(only_a, total, 0.5).pvalue if total else 1.0
            assert mcnemar_exact(only_a, only_b) == pytest.approx(expected, abs=1e-12)


def test_mcnemar_needs_six_one_sided_items():
    assert mcnemar_exact(5, 0) > 0.05 > mcnemar_exact(6, 0)
    assert mcnemar_exact(0, 6) == mcnemar_exact(6, 0)


@pytest.mark.parametrize(("correct", "total"), [(0, 10), (1, 10), (37, 50), (10, 10), (900, 1319)])
def test_wilson_equals_scipy(correct, total):
    expected = binomtest(correct, total).proportion_ci(0.95, "wilson")
    assert wilson_interval(correct, total) == pytest.approx(tuple(expected), abs=1e-12)


def test_bootstrap_is_seeded_and_near_the_normal_interval():
    differences = np.random.default_rng(3).normal(0.2, 1.0, 400)
    mean, low, high = paired_bootstrap(differences, 7)
    assert (mean, low, high) == paired_bootstrap(differences, 7)
    assert (low, high) != paired_bootstrap(differences, 8)[1:]
    half = 1.96 * differences.std() / 20
    assert mean == pytest.approx(differences.mean())
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=0.015)


def test_bootstrap_of_equal_scores_is_a_point():
    assert paired_bootstrap(np.zeros(20), 0) == (0.0, 0.0, 0.0)


def test_bootstrap_in_several_chunks_has_all_its_resamples():
    differences = np.random.default_rng(0).normal(0, 1, 5000)
    _, low, high = paired_bootstrap(differences, 0)
    assert high - low == pytest.approx(2 * 1.96 * differences.std() / 5000**0.5, rel=0.1)


def test_standard_errors_of_known_scores():
    assert proportion_error(0.3503, 1319) == pytest.approx(0.0131, abs=5e-5)
    assert proportion_error(0.36, 50) == pytest.approx(0.068, abs=5e-4)
    assert proportion_error(0.45, 50) == pytest.approx(0.070, abs=5e-4)


@pytest.mark.parametrize(
    ("share_a", "share_b", "total", "differs"),
    [(0.3503, 0.3457, 1319, False), (0.36, 0.45, 50, False), (0.90, 0.80, 1319, True)],
)
def test_unpaired_difference_is_found_only_outside_noise(share_a, share_b, total, differs):
    errors = proportion_error(share_a, total), proportion_error(share_b, total)
    assert (unpaired_p(share_b - share_a, *errors) < 0.05) is differs


def test_unpaired_without_any_error_is_decided_by_the_difference():
    assert unpaired_p(0.0, 0.0, 0.0) == 1.0
    assert unpaired_p(-1.0, 0.0, 0.0) == 0.0


def test_detectable_unpaired_difference_is_found_four_times_in_five():
    total, share = 800, 0.4
    delta = detectable_unpaired(share, total, total)
    rng = np.random.default_rng(0)
    a = rng.binomial(total, share - delta / 2, 2000) / total
    b = rng.binomial(total, share + delta / 2, 2000) / total
    found = [
        unpaired_p(y - x, proportion_error(x, total), proportion_error(y, total)) < 0.05
        for x, y in zip(a, b, strict=True)
    ]
    assert np.mean(found) == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize(("discordant", "total"), [(0, 100), (30, 300)])
def test_detectable_paired_difference_is_found_four_times_in_five(discordant, total):
    delta = detectable_paired(discordant, total)
    rate = max(discordant / total, delta)
    rng = np.random.default_rng(1)
    tables = rng.multinomial(
        total, [(rate + delta) / 2, (rate - delta) / 2 + 1e-15, 1 - rate], 1500
    )
    found = [mcnemar_exact(int(b), int(c)) < 0.05 for b, c, _ in tables]
    assert np.mean(found) == pytest.approx(0.8, abs=0.04)


def test_detectable_paired_difference_shrinks_with_items_and_is_none_for_five():
    found = [detectable_paired(0, total) for total in (20, 50, 200, 1319)]
    assert found == sorted(found, reverse=True)
    assert detectable_paired(0, 5) is None
    assert detectable_paired(0, 6) is not None
