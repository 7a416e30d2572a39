import numpy as np
import torch

from cgprof.accuracy.tally import Outcome, Tally


def outcome(*values, tokens=(1,)):
    return Outcome(hidden=torch.tensor([values]), tokens=np.array(tokens))


def test_equal_cases_are_counted_and_exact():
    tally = Tally("replay-eager", replays=2)
    tally.compare(outcome(1.0, 2.0), outcome(1.0, 2.0), "a")
    tally.compare(outcome(1.0, 2.0, tokens=(3, 4)), outcome(1.0, 2.0, tokens=(3, 4)), "a")
    result = tally.result(tally.is_exact)
    assert result.passed is True
    assert result.bitwise_equal
    assert result.max_abs_diff == 0
    assert result.tokens_compared == 3
    assert result.cases == ("a",)


def test_last_bit_is_a_difference():
    tally = Tally("replay-eager", replays=1)
    tally.compare(outcome(1.0), outcome(1.0 + 2.0**-23), "a")
    assert not tally.is_exact
    assert tally.result(tally.is_exact).max_abs_diff == 2.0**-23


def test_other_token_is_a_difference():
    tally = Tally("replay-eager", replays=1)
    tally.compare(outcome(1.0, tokens=(1, 2)), outcome(1.0, tokens=(1, 3)), "a")
    assert tally.tokens_different == 1
    assert not tally.is_exact


def test_equal_nan_is_counted_and_never_passes():
    tally = Tally("replay-eager", replays=1)
    nan = float("nan")
    tally.compare(outcome(nan, 1.0), outcome(nan, 1.0), "a")
    result = tally.result(tally.is_exact)
    assert result.passed is False
    assert result.nonfinite == 1
    assert result.max_abs_diff is None


def test_no_replay_is_no_verdict():
    tally = Tally("poisoned-padding")
    tally.notes.append("nothing to pad")
    result = tally.result(tally.is_exact)
    assert result.passed is None
    assert not result.bitwise_equal
    assert "not verified" in result.note
    assert "nothing to pad" in result.note
