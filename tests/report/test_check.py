import pytest

from cgprof.record.types import Failure
from cgprof.report.check import check_document, check_verdict
from cgprof.report.tables import capture_document, report_document
from tests.support.checks import (
    checked_run,
    divergence,
    greedy,
    plant,
    score,
    verdict,
    weights,
)
from tests.support.documents import data_of, text_of
from tests.support.runs import all_legs, failed_graph, key, leg, tape_graph

REPLAY, REFERENCE, PADDING = "replay-eager", "step-reference", "poisoned-padding"

NO_PADDING = leg(PADDING, passed=None, replays=0, tokens_compared=0)


def with_legs(**changed):
    legs = {one.leg: one for one in all_legs()} | changed
    return (tape_graph(key(8), parity=tuple(legs.values())), tape_graph(key(8, 2)))


def test_check_of_which_every_leg_passed_is_a_pass():
    found = check_verdict(checked_run())
    assert (found.word, found.reasons) == ("pass", ())


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (checked_run(with_legs(**{REPLAY: leg(REPLAY, passed=False)})), REPLAY),
        (checked_run(check={"greedy": greedy(passed=False, note="part")}), "greedy: part"),
        (checked_run(check={"weights": weights(passed=False, different=("a.w",))}), "a.w"),
        (checked_run(verdicts=(verdict("different"),)), "task: replay against eager: different"),
        (checked_run((tape_graph(key(8)), failed_graph(key(8, 2)))), "not captured"),
        (
            checked_run(failures=(Failure(where="task", error="ConfigError", message="long"),)),
            "task failed: long",
        ),
    ],
)
def test_one_failed_leg_fails_the_check_and_is_named(record, reason):
    found = check_verdict(record)
    assert found.word == "FAIL"
    assert len(found.reasons) == 1
    assert reason in found.reasons[0]


@pytest.mark.parametrize(
    "record",
    [
        checked_run((), check={"greedy": greedy(passed=None, replays={}, note="not verified")}),
        checked_run(with_legs(**{REPLAY: leg(REPLAY, passed=None, replays=0)})),
        checked_run(with_legs(**{REFERENCE: leg(REFERENCE, passed=True, replays=0)})),
        checked_run(check={"greedy": greedy(passed=None, note="not verified: no twin replayed")}),
        checked_run(verdicts=(verdict("not verified"),)),
    ],
)
def test_leg_without_a_replay_is_not_verified_and_never_a_pass(record):
    assert check_verdict(record).word == "not verified"
    assert text_of(check_document(record)).startswith("check: not verified")


def test_differences_within_the_noise_are_inconclusive():
    note = "inconclusive: each first difference lies within the noise of two eager sizes"
    record = checked_run(check={"greedy": greedy(passed=None, note=note)})
    assert check_verdict(record).word == "inconclusive"
    assert check_verdict(checked_run(verdicts=(verdict("inconclusive"),))).word == "inconclusive"


def test_key_without_padding_rows_leaves_nothing_open():
    record = checked_run(with_legs(**{PADDING: NO_PADDING}))
    assert check_verdict(record).word == "pass"
    rows = {row["key"]: row for row in data_of(check_document(record))["keys"]}
    assert rows[str(key(8))][PADDING] == "n/a"


def test_replays_stand_beside_every_key():
    rows = {row["key"]: row for row in data_of(check_document(checked_run()))["keys"]}
    plain, twin = rows[str(key(8))], rows[str(key(8, 2))]
    assert (plain["parity_replays"], plain["greedy_replays"], plain["task_replays"]) == (3, 30, 0)
    assert (twin["parity_replays"], twin["greedy_replays"], twin["task_replays"]) == (3, 20, 40)
    assert twin[REPLAY] == "pass"


def test_sample_is_called_partial_and_other_keys_not_checked():
    graphs = (tape_graph(key(8)), tape_graph(key(8, 2), parity=()))
    check = {"checked": (str(key(8)),), "sample_seed": 7}
    record = checked_run(graphs, check=check)
    text = text_of(check_document(record))
    assert text.startswith("check: pass, partial: 1 of 2 keys drawn with seed 7\n")
    assert data_of(check_document(record))["keys"][1][REPLAY] == "not checked"


def test_first_difference_is_shown_with_its_gaps_and_the_noise_floor_beside_it():
    noise = (divergence(request="first-1", explained=True),)
    found = greedy(passed=False, divergences=(divergence(),), noise_divergences=noise)
    text = text_of(check_document(checked_run(check={"greedy": found})))
    assert "late-3, token 5: 7 replay, 9 eager; logit gap 0.25 and 0.5" in text
    assert (
        "first-1, token 5: 7 padded, 9 unpadded; logit gap 0.25 and 0.5, within the noise" in text
    )
    assert "noise floor, eager padded against unpadded: 1 requests part" in text


def test_accuracy_has_interval_size_rule_seed_and_paired_verdict():
    text = text_of(check_document(checked_run()))
    assert (
        "accuracy of arithmetic, n 200: eager 0.95 [0.9104, 0.9726], replay 0.95 [0.9104, 0.9726]; "
        "replay against eager: same, 0 of 200 items differ" in text
    )
    assert "200 held-out problems, seed 0; the question alone; exact text" in text
    assert "900 from twins" in text


def test_score_without_its_kind_of_replay_is_not_verified():
    accuracy = (score("eager"), score("replay", tokens_twin=0, tokens_plain=900))
    text = text_of(
        check_document(checked_run(accuracy=accuracy, verdicts=(verdict("not verified"),)))
    )
    assert "replay 0.95 [0.9104, 0.9726] (not verified)" in text


def test_random_weights_say_that_there_is_no_accuracy():
    note = "random weights: no task accuracy"
    record = checked_run(accuracy=(), verdicts=(), accuracy_note=note)
    assert note in text_of(check_document(record))
    assert note in text_of(capture_document(record))


def test_capture_table_has_one_accuracy_line():
    lines = text_of(capture_document(checked_run())).splitlines()
    assert sum(line.startswith("accuracy of arithmetic") for line in lines) == 1


def test_planted_fault_shows_what_was_stated_and_whether_the_task_would_tell():
    text = text_of(check_document(checked_run(check={"plant": plant()})))
    assert "stated: red replay-eager; green weights" in text
    assert "found:  red greedy, replay-eager; green weights" in text
    assert "as stated: yes" in text
    assert "the task alone would notice: 0.95 clean, 0.1 faulty" in text
    blind = plant(as_stated=False, task=verdict(a="clean", b="faulty"))
    text = text_of(check_document(checked_run(check={"plant": blind})))
    assert "as stated: NO" in text
    assert "the task alone would not notice" in text


def test_report_of_a_checked_run_has_the_check():
    assert "check: pass" in text_of(report_document([checked_run()]))
    assert "check: " not in text_of(
        report_document([checked_run().model_copy(update={"check": None})])
    )


def test_json_is_strict():
    document = data_of(check_document(checked_run()))
    assert document["verdict"] == "pass"
    assert document["run"]["check"]["captured"] == 2
