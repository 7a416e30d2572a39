import numpy as np
import pytest

from cgprof.stats.hidden import hidden_share


def around(median, spread=0.001, count=20):
    rng = np.random.default_rng(median)
    return np.rint(median * (1 + rng.uniform(-spread, spread, count))).astype(np.int64)


@pytest.mark.parametrize(
    ("split", "share"), [(820_000, 0.9), (900_000, 0.5), (1_000_000, 0.0), (1_200_000, -1.0)]
)
def test_hidden_share_is_what_the_split_step_does_not_pay(split, share):
    found = hidden_share(around(1_000_000), around(800_000), around(split), around(800_000), seed=0)
    value, low, high = found
    assert value == pytest.approx(share, abs=0.02)
    assert low <= value <= high
    assert high - low < 0.05


def test_hidden_share_may_be_above_one_when_the_bare_split_step_is_slower():
    constant = np.full(10, 1)
    found = hidden_share(100 * constant, 60 * constant, 70 * constant, 80 * constant, seed=0)
    assert found == (1.25, 1.25, 1.25)


def test_an_exchange_that_cannot_be_told_from_zero_has_no_hidden_share():
    same = around(1_000_000, spread=0.2)
    assert hidden_share(same, around(999_000, spread=0.2), same, same, seed=0) is None
    assert hidden_share(same, same, same, same, seed=0) is None
    faster = around(500_000)
    assert hidden_share(faster, around(800_000), same, same, seed=0) is None


def test_no_samples_have_no_hidden_share():
    some, none = np.full(5, 9), np.zeros(0, np.int64)
    assert hidden_share(some, none, some, some, seed=0) is None


def test_hidden_share_is_the_same_for_the_same_seed():
    series = (around(1_000_000, 0.1), around(700_000, 0.1), around(900_000), around(700_000))
    assert hidden_share(*series, seed=3) == hidden_share(*series, seed=3)
    assert hidden_share(*series, seed=3) != hidden_share(*series, seed=4)
