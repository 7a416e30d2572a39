import numpy as np
import pandas as pd
import pytest

from cgprof.report.changes import Change, change_of, launch_verdict, samples_of, worst


@pytest.mark.parametrize(
    ("ratio", "low", "high", "verdict"),
    [
        (1.20, 1.10, 1.30, "regression"),
        (0.80, 0.70, 0.90, "improved"),
        (1.03, 1.01, 1.10, "same"),
        (0.97, 0.90, 0.99, "same"),
        (1.00, 0.98, 1.02, "same"),
        (1.20, 0.90, 1.40, "inconclusive"),
        (1.00, 0.90, 1.10, "inconclusive"),
        (1.20, None, None, "inconclusive"),
        (None, None, None, "inconclusive"),
    ],
)
def test_change_counts_only_past_five_percent_and_outside_the_interval(ratio, low, high, verdict):
    change = Change(a_ns=100, b_ns=120, ratio=ratio, low=low, high=high)
    assert change.verdict == verdict


def test_change_that_neither_run_measured_has_no_verdict():
    assert Change(a_ns=None, b_ns=None).verdict is None
    assert Change(a_ns=None, b_ns=5).verdict == "inconclusive"


def test_change_is_b_over_a_with_an_interval_around_it():
    a = np.arange(95, 106, dtype=np.int64)
    change = change_of(100, 200, a, 2 * a)
    assert change.ratio == 2
    assert change.low < 2 < change.high
    assert change.verdict == "regression"


def test_change_below_five_samples_has_a_ratio_and_no_interval():
    few = np.array([100, 100, 100, 100], dtype=np.int64)
    change = change_of(100, 200, few, 2 * few)
    assert (change.ratio, change.low, change.verdict) == (2, None, "inconclusive")


def test_change_from_zero_has_no_ratio():
    zeros = np.zeros(10, dtype=np.int64)
    assert change_of(0, 100, zeros, zeros + 100).ratio is None


def test_samples_of_takes_one_phase_of_one_key_and_drops_nulls():
    frame = pd.DataFrame(
        {
            "key": pd.Categorical(["a", "a", "a", "b"]),
            "phase": pd.Categorical(["hot", "hot", "eager", "hot"]),
            "device_ns": [1.0, None, 3.0, 4.0],
        }
    )
    assert list(samples_of(frame, "a", "hot", "device_ns")) == [1]
    assert samples_of(frame, "c", "hot", "device_ns").size == 0


@pytest.mark.parametrize(
    ("verdicts", "verdict"),
    [
        (["same", "improved", "regression"], "regression"),
        (["same", "improved", "inconclusive"], "inconclusive"),
        (["same", "improved"], "improved"),
        (["same", "inconclusive"], "inconclusive"),
        (["same", "same"], "same"),
        ([], "inconclusive"),
    ],
)
def test_worst_lets_a_regression_outweigh_all(verdicts, verdict):
    assert worst(verdicts) == verdict


@pytest.mark.parametrize("samples", [[100], [0] * 10, [1, 10, 100, 1000, 10_000]])
def test_identical_samples_have_not_changed(samples):
    same = np.array(samples, dtype=np.int64)
    median_ns = int(np.median(same))
    change = change_of(median_ns, median_ns, same, same.copy())
    assert (change.ratio, change.verdict) == (1, "same")


@pytest.mark.parametrize(
    ("recorder", "hot", "turns", "verdict"),
    [
        ("cuda", "regression", "regression", "regression"),
        ("cuda", "improved", "improved", "improved"),
        ("cuda", "regression", "same", "inconclusive"),
        ("cuda", "improved", "regression", "inconclusive"),
        ("cuda", "improved", None, "inconclusive"),
        ("cuda", "same", "same", "same"),
        ("cuda", "same", "inconclusive", "inconclusive"),
        ("cuda", None, None, None),
        ("tape", "regression", "regression", "inconclusive"),
        ("tape", "improved", "improved", "inconclusive"),
        ("tape", "same", "same", "same"),
    ],
)
def test_launch_counts_only_where_hot_and_round_robin_agree_on_a_gpu(recorder, hot, turns, verdict):
    assert launch_verdict(recorder, hot, turns) == verdict


@pytest.mark.parametrize(
    ("both", "host_ratio", "verdict"),
    [
        ("regression", 1.9, "inconclusive"),
        ("regression", 1.2, "regression"),
        ("regression", 0.5, "regression"),  # although the host was faster
        ("improved", 0.5, "inconclusive"),
        ("improved", 0.9, "improved"),
        ("improved", 1.9, "improved"),
        ("same", 1.9, "same"),
    ],
)
def test_launch_that_changed_as_its_host_did_is_inconclusive(both, host_ratio, verdict):
    assert launch_verdict("cuda", both, both, host_ratio) == verdict
