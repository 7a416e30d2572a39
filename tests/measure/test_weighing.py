import dataclasses

import numpy as np
import pytest

from cgprof.graphs.dispatch import eager_key
from cgprof.measure.weighing import IN_NOISE, StepSamples, slowest, weigh
from cgprof.measure.worth_cases import WorthCase
from cgprof.shapes import DecisionReason, StepDecision

CASE = WorthCase(
    kind="prefill",
    num_tokens=512,
    num_reqs=1,
    plain=eager_key(512),
    split=eager_key(512, 2),
)


def around(median, spread=0.01, count=20):
    offsets = np.random.default_rng(median).permutation(np.linspace(-spread, spread, count))
    return np.rint(median * (1 + offsets)).astype(np.int64)


def row(plain, split, plain_bare=None, split_bare=None, **facts):
    return weigh(
        CASE,
        StepSamples(
            plain=plain, split=split, plain_bare=plain_bare, split_bare=split_bare, **facts
        ),
        seed=0,
    )


def test_row_has_the_times_and_everything_that_follows():
    found = row(around(1_000_000), around(900_000), around(700_000), around(750_000))
    assert (found.plain.median_ns, found.split.median_ns) == (1_000_000, 900_000)
    assert (found.plain_bare.median_ns, found.split_bare.median_ns) == (700_000, 750_000)
    assert (found.exchange_ns, found.exposed_ns) == (300_000, 150_000)
    assert found.hidden.value == pytest.approx(0.5)
    assert found.hidden.low < 0.5 < found.hidden.high
    assert found.hidden_note == ""
    assert found.speedup.value == pytest.approx(10 / 9)
    assert found.verdict == "worth it"
    assert found.plain.count == 20
    assert (found.plain_label, found.split_label) == ("NONE-512", "NONE-512-mb2")


@pytest.mark.parametrize(
    ("split", "spread", "verdict"),
    [
        (900_000, 0.01, "worth it"),
        (1_100_000, 0.01, "not worth it"),
        (1_000_100, 0.01, "undecided"),
        (900_000, 0.5, "undecided"),
    ],
)
def test_verdict_needs_an_interval_on_one_side_of_one(split, spread, verdict):
    assert row(around(1_000_000, spread), around(split, spread)).verdict == verdict


def test_row_without_bare_steps_keeps_the_reason():
    found = row(around(1_000_000), around(900_000), bare_note="no memory")
    assert (found.bare_note, found.hidden_note) == ("no memory", "no memory")
    assert found.hidden is None
    assert found.exchange_ns is None
    assert found.verdict == "worth it"


def test_exchange_within_noise_has_its_difference_but_no_hidden_share():
    noisy = around(1_000_000, 0.3)
    found = row(noisy, noisy, around(999_000, 0.3), noisy)
    assert found.hidden is None
    assert found.hidden_note == IN_NOISE
    assert found.exchange_ns == 1_000


def test_slowest_takes_each_step_from_the_rank_that_took_longest():
    first, second = np.array([1, 5, 3]), np.array([2, 4, 9])
    assert slowest([first, second]).tolist() == [2, 5, 9]


def test_row_of_an_uneven_load_tells_the_smallest_rank():
    decided = tuple(
        StepDecision(key=key, tokens_per_rank=(64, 32, 64), reason=DecisionReason.NO_FIT)
        for key in (CASE.plain, CASE.split)
    )
    case = dataclasses.replace(CASE, kind="spread", num_tokens=64, decided=decided)
    found = weigh(case, StepSamples(plain=around(1000), split=around(900)), seed=0)
    assert (found.kind, found.num_tokens, found.fewest_tokens) == ("spread", 64, 32)
    assert row(around(1000), around(900)).fewest_tokens is None
