import pytest

from cgprof.report.parity import key_verdict, leg_verdict, legs_table
from tests.support.runs import all_legs, cuda_graph, key, leg

FAILED_LEG = leg(
    "step-reference",
    passed=False,
    max_abs_diff=0.5,
    floor=0.002,
    tolerance=0.004,
    tokens_different=2,
    nonfinite=1,
    note="context 257",
)
UNVERIFIED_LEG = leg("poisoned-padding", passed=None, note="no verdict")
NO_PADDING = leg("poisoned-padding", passed=None, replays=0, tokens_compared=0)


def graph_with(*legs):
    return cuda_graph(key(8), parity=legs)


@pytest.mark.parametrize(
    ("legs", "verdict"),
    [
        (all_legs(), "pass"),
        ((leg("replay-eager"), FAILED_LEG), "FAIL step-reference"),
        ((leg("replay-eager", passed=False), FAILED_LEG), "FAIL replay-eager step-reference"),
        ((leg("replay-eager"), UNVERIFIED_LEG), "pass 1 of 2"),
        ((leg("replay-eager"), leg("step-reference"), NO_PADDING), "pass"),
        ((UNVERIFIED_LEG,), "not verified"),
        ((NO_PADDING,), "not verified"),
        ((), "not verified"),
    ],
)
def test_key_verdict_is_one_word_and_names_failed_legs(legs, verdict):
    assert key_verdict(graph_with(*legs)) == verdict


def test_pass_without_a_replay_is_not_verified():
    assert leg_verdict(leg("replay-eager", replays=0)) == "not verified"
    assert leg_verdict(leg("replay-eager", passed=False, replays=0)) == "FAIL"


def test_legs_table_counts_every_leg_and_takes_the_worst():
    graphs = [graph_with(*all_legs()), graph_with(leg("replay-eager"), FAILED_LEG, UNVERIFIED_LEG)]
    rows = {row["leg"]: row for row in legs_table(graphs).records()}
    reference = rows["step-reference"]
    assert (reference["keys"], reference["passed"], reference["failed"]) == (2, 1, 1)
    assert (reference["worst_diff"], reference["floor"], reference["tolerance"]) == (
        0.5,
        0.002,
        0.004,
    )
    assert (reference["tokens_compared"], reference["tokens_different"]) == (24, 2)
    assert reference["nonfinite"] == 1
    assert rows["poisoned-padding"]["not_verified"] == 1


def test_legs_table_names_each_key_that_did_not_pass_and_the_cases():
    notes = legs_table([graph_with(FAILED_LEG, UNVERIFIED_LEG), graph_with(*all_legs())]).notes
    assert (
        "FAIL: FULL-8x8q1, step-reference: worst diff 0.5, tolerance 0.004, 1 non-finite, "
        "2 of 12 tokens different, context 257"
    ) in notes
    assert (
        "not verified: FULL-8x8q1, poisoned-padding: worst diff 0, bitwise asked, no verdict"
        in notes
    )
    assert "step-reference: 1 case (contexts 1, 15, 16, 17), contexts 1 15 16 17" in notes


def test_legs_table_counts_a_key_without_padding_apart_and_does_not_complain():
    table = legs_table([graph_with(leg("replay-eager"), NO_PADDING)])
    padding = next(row for row in table.records() if row["leg"] == "poisoned-padding")
    assert (padding["not_verified"], padding["not_applicable"]) == (0, 1)
    assert not any(note.startswith(("not verified", "n/a")) for note in table.notes)
