import pytest

from cgprof.batch.context import PlainHandoff


def test_plain_handoff_runs_the_transfer_before_what_hides_it():
    calls = []
    PlainHandoff().communicate(lambda: calls.append("op"), lambda: calls.append("meanwhile"))
    PlainHandoff().communicate(lambda: calls.append("op"))
    assert calls == ["op", "meanwhile", "op"]


def test_plain_handoff_that_transfers_nothing_runs_what_would_hide_it():
    calls = []
    PlainHandoff().communicate(None, lambda: calls.append("meanwhile"))
    PlainHandoff().communicate(None)
    assert calls == ["meanwhile"]


def test_plain_handoff_lets_an_error_through_and_skips_the_rest():
    calls = []

    def fail():
        raise ValueError("no peer")

    with pytest.raises(ValueError, match="no peer"):
        PlainHandoff().communicate(fail, lambda: calls.append("meanwhile"))
    assert not calls
