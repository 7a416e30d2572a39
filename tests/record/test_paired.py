import numpy as np
import pytest

from cgprof.record.paired import paired_verdict, unlike
from cgprof.record.scores import AccuracyResult, ItemScore
from cgprof.stats.paired import proportion_error


def score(value, n, **fields):
    known = {
        "task": "gsm8k",
        "kind": "generate",
        "phase": "eager",
        "n": n,
        "correct": round(value * n),
        "value": value,
        "se": proportion_error(value, n) if 0 <= value <= 1 else None,
        "subset_rule": f"first {n} of 1319",
        "prompt_rule": "zero-shot",
        "scoring_rule": "exact text",
        "items_fingerprint": f"{n}",
    }
    return AccuracyResult(**{**known, **fields})


def items(scores, *, tokens=10):
    return [
        ItemScore(
            task="t",
            kind="generate",
            phase="eager",
            item_id=str(index),
            prompt="p",
            gold="g",
            output="o",
            token_ids=tuple(range(tokens)),
            score=None if value is None else float(value),
            correct=bool(value and value > 0),
        )
        for index, value in enumerate(scores)
    ]


def likelihood(scores):
    value = None if None in scores else -float(np.mean(scores)) / 10
    fields = {"kind": "likelihood", "correct": None, "se": 0.01, "value": value}
    return score(0.5, len(scores)).model_copy(update=fields)


@pytest.mark.parametrize(
    ("a", "b", "n", "verdict"),
    [
        (0.3503, 0.3457, 1319, "same"),
        (0.36, 0.45, 50, "inconclusive"),
        (0.90, 0.80, 1319, "different"),
    ],
)
def test_unpaired_scores_differ_only_outside_noise(a, b, n, verdict):
    found = paired_verdict(score(a, n), (), score(b, n), ())
    assert found.verdict == verdict
    assert found.test == "unpaired-z"
    assert found.flags == ()
    assert (found.p_value < 0.05) is (verdict == "different")
    assert found.low < b - a < found.high


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"n": 900, "correct": 720}, "n: 1319 in A, 900 in B"),
        ({"subset_rule": "1319 drawn with seed 3"}, "subset: "),
        ({"seed": 3}, "seed: None in A, 3 in B"),
        ({"prompt_rule": "4 of 4 fixed examples first"}, "prompts: "),
        ({"scoring_rule": "best log-probability by tokens"}, "scoring: "),
        ({"items_fingerprint": "other"}, "items: "),
    ],
)
def test_unlike_subsets_are_flagged_and_never_decided(fields, flag):
    a, b = score(0.9, 1319), score(0.8, 1319).model_copy(update=fields)
    found = paired_verdict(a, items([1] * 1319), b, items([0] * b.n))
    assert found.flags[0].startswith(flag)
    assert found.verdict == "inconclusive"
    assert found.only_a is None
    assert unlike(a, a) == ()


@pytest.mark.parametrize(
    ("lost", "won", "n", "verdict"),
    [
        (0, 0, 1319, "same"),
        (0, 0, 50, "inconclusive"),
        (6, 0, 200, "different"),
        (5, 0, 200, "same"),
        (40, 30, 1319, "same"),
        (45, 20, 1319, "different"),
    ],
)
def test_paired_answers_are_judged_by_discordant_items(lost, won, n, verdict):
    both = n - lost - won
    in_a = [1] * both + [1] * lost + [0] * won
    in_b = [1] * both + [0] * lost + [1] * won
    a, b = score(sum(in_a) / n, n), score(sum(in_b) / n, n)
    found = paired_verdict(a, items(in_a), b, items(in_b))
    assert (found.test, found.only_a, found.only_b) == ("mcnemar-exact", lost, won)
    assert found.verdict == verdict
    assert found.delta == pytest.approx((won - lost) / n)
    assert found.items_different == lost + won
    assert found.low <= found.delta <= found.high


def test_paired_test_sees_what_an_unpaired_one_cannot():
    n = 400
    in_a, in_b = [1] * 200 + [0] * 200, [1] * 190 + [0] * 210
    a, b = score(0.5, n), score(0.475, n)
    assert paired_verdict(a, items(in_a), b, items(in_b)).verdict == "different"
    assert paired_verdict(a, (), b, ()).verdict != "different"


def test_items_are_matched_by_id_and_not_by_order():
    rows = items([1] * 100 + [0] * 100)
    a, b = score(0.5, 200), score(0.5, 200)
    found = paired_verdict(a, rows, b, rows[::-1])
    assert (found.only_a, found.only_b) == (0, 0)


def test_missing_items_leave_an_unpaired_test():
    rows = items([1] * 150)
    a, b = score(1.0, 150), score(1.0, 150)
    found = paired_verdict(a, rows, b, rows[:100])
    assert found.test == "unpaired-z"
    assert found.items_different is None


def test_likelihood_is_judged_by_a_seeded_paired_bootstrap():
    scores = np.random.default_rng(0).normal(-30, 8, 200)
    worse = scores - np.random.default_rng(1).normal(0.5, 0.5, 200)
    noise = scores + np.random.default_rng(2).normal(0, 0.01, 200)
    a = likelihood(list(scores))
    found = paired_verdict(a, items(scores), likelihood(list(worse)), items(worse), seed=4)
    assert (found.test, found.verdict, found.seed) == ("paired-bootstrap", "different", 4)
    assert found.delta == pytest.approx(0.05, abs=0.01)
    again = paired_verdict(a, items(scores), likelihood(list(worse)), items(worse), seed=4)
    assert again == found
    near = paired_verdict(a, items(scores), likelihood(list(noise)), items(noise))
    assert (near.verdict, near.items_different) == ("same", 200)
    equal = paired_verdict(a, items(scores), a, items(scores))
    assert (equal.verdict, equal.delta, equal.low, equal.high) == ("same", 0, 0, 0)
    assert equal.items_different == 0


def test_few_likelihoods_are_inconclusive_even_when_equal():
    scores = [-10.0] * 20
    found = paired_verdict(likelihood(scores), items(scores), likelihood(scores), items(scores))
    assert found.verdict == "inconclusive"


def test_likelihood_that_is_finite_on_one_side_alone_is_different():
    scores = [-10.0] * 40
    broken = [None, *scores[1:]]
    bad = likelihood(broken).model_copy(update={"nonfinite": 1})
    found = paired_verdict(likelihood(scores), items(scores), bad, items(broken))
    assert (found.verdict, found.items_different) == ("different", 1)
    both = paired_verdict(bad, items(broken), bad, items(broken))
    assert both.verdict == "inconclusive"


@pytest.mark.parametrize(
    ("fields", "verified"),
    [
        ({"about": "twin", "tokens_plain": 90}, False),
        ({"about": "twin", "tokens_twin": 90}, True),
        ({"about": "plain", "tokens_plain": 90}, True),
        ({"about": "plain", "tokens_eager": 90}, False),
    ],
)
def test_score_without_a_replay_of_its_kind_is_not_verified(fields, verified):
    rows = items([1] * 200)
    replay = score(1.0, 200, phase="replay", **fields)
    assert replay.verified is verified
    found = paired_verdict(score(1.0, 200), rows, replay, rows)
    assert found.verdict == ("same" if verified else "not verified")


def test_the_rule_stands_in_the_verdict():
    found = paired_verdict(score(0.5, 200), (), score(0.5, 200), ())
    assert "80 % power" in found.rule
    assert "not verified" in found.rule
