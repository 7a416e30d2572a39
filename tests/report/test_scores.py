import pytest

from cgprof.record.paired import paired_verdict
from cgprof.record.store import RunWriter
from cgprof.report.compare import compare_runs
from cgprof.report.scores import compare_scores, scores_table, verdicts_table
from cgprof.report.tables import report_document
from tests.support.documents import data_of, text_of
from tests.support.runs import cuda_run, samples_of
from tests.support.scores import items_for, score_of

RIGHT = [True] * 180 + [False] * 20
WORSE = [False] * 30 + [True] * 150 + [False] * 20


def write(path, *item_lists, record=None, scores=None):
    scores = scores or tuple(score_of(items) for items in item_lists)
    writer = RunWriter(path)
    record = (record or cuda_run()).model_copy(update={"accuracy": scores})
    writer.samples = samples_of(record)
    writer.items += [item for items in item_lists for item in items]
    writer.write(record)
    return path


def test_table_gives_every_score_with_size_error_interval_and_origin():
    table = scores_table([score_of(items_for(RIGHT, phase="eager")), score_of(items_for(RIGHT))])
    eager, replay = table.records()
    assert (replay["n"], replay["correct"], replay["value"]) == (200, 180, 0.9)
    assert replay["low"] < 0.9 < replay["high"]
    assert replay["se"] == pytest.approx((0.09 / 200) ** 0.5)
    assert (eager["verified"], replay["verified"]) == (None, "yes")
    notes = "\n".join(table.notes)
    assert "first 200 of 1319, seed -" in notes
    assert "300 from twins, 20 eager" in notes
    assert "FULL-8x8q1-mb2 300, NONE-64 20" in notes


def test_score_without_its_replays_is_shown_as_not_verified():
    score = score_of(items_for(RIGHT), tokens_twin=0, tokens_plain=300)
    assert scores_table([score]).records()[0]["verified"] == "not verified"


def test_verdicts_show_discordant_counts_detectable_effect_flags_and_rule():
    a, b = items_for(RIGHT), items_for(WORSE)
    table = verdicts_table([paired_verdict(score_of(a), a, score_of(b), b)])
    row = table.records()[0]
    assert (row["only_a"], row["only_b"], row["items_different"]) == (30, 0, 30)
    assert (row["verdict"], row["test"], row["n_a"]) == ("different", "mcnemar-exact", 200)
    assert 0 < row["detectable"] < 0.2
    assert "80 % power" in "\n".join(table.notes)
    short = items_for(RIGHT[:150])
    flagged = verdicts_table([paired_verdict(score_of(a), a, score_of(short), short)])
    flagged_row = flagged.records()[0]
    assert (flagged_row["n_a"], flagged_row["n_b"]) == (200, 150)
    assert "n: 200 in A, 150 in B" in flagged.notes[0]


def test_report_has_the_scores_of_a_run_and_none_where_none_was_asked():
    items = items_for(RIGHT)
    record = cuda_run(
        accuracy=(score_of(items),),
        verdicts=(paired_verdict(score_of(items), items, score_of(items), items),),
    )
    text = text_of(report_document([record]))
    assert "\naccuracy\n" in text
    assert "\npaired verdicts\n" in text
    assert "\npaired verdicts\n" not in text_of(report_document([cuda_run()]))


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [(RIGHT, WORSE, "regression"), (WORSE, RIGHT, "improved"), (RIGHT, RIGHT, "same")],
)
def test_compare_judges_two_runs_by_the_items_of_both(tmp_path, first, second, verdict):
    a = write(tmp_path / "a", items_for(first))
    b = write(tmp_path / "b", items_for(second))
    found = compare_runs(a, b)
    assert found.scores[0].found.test == "mcnemar-exact"
    assert found.verdict == verdict
    assert "arithmetic, generate, replay" in text_of(found.to_document())
    assert data_of(found.to_document())["accuracy"][0]["verdict"] == verdict


def test_compare_matches_tasks_and_phases_and_names_what_has_no_partner(tmp_path):
    eager, replay = items_for(WORSE, phase="eager"), items_for(RIGHT)
    other = items_for(RIGHT, task="piqa", kind="multiple-choice")
    a = write(tmp_path / "a", items_for(RIGHT, phase="eager"), replay)
    b = write(tmp_path / "b", eager, replay, other)
    found = {(pair.task, pair.phase): pair for pair in compare_runs(a, b).scores}
    assert found["arithmetic", "replay"].verdict == "same"
    assert found["arithmetic", "eager"].found.only_a == 30
    assert found["arithmetic", "eager"].verdict is None  # shown, not judged
    assert found["piqa", "replay"].reason == "scored only in B"
    assert compare_runs(a, b).verdict == "same"


def test_compare_without_items_falls_back_to_standard_errors(tmp_path):
    a = write(tmp_path / "a", items_for(RIGHT))
    b = write(tmp_path / "b", scores=(score_of(items_for(WORSE)),))
    found = compare_runs(a, b).scores[0].found
    assert (found.test, found.only_a) == ("unpaired-z", None)
    assert found.verdict == "different"


def test_compare_of_unlike_subsets_is_flagged_and_inconclusive(tmp_path):
    a = write(tmp_path / "a", items_for(RIGHT))
    b = write(tmp_path / "b", items_for(RIGHT[:150]))
    found = compare_runs(a, b)
    assert found.verdict == "inconclusive"
    assert "n: 200 in A, 150 in B" in text_of(found.to_document())


@pytest.mark.parametrize(
    ("value_a", "value_b", "verdict"),
    [(2.0, 2.1, "regression"), (2.1, 2.0, "improved"), (2.0, None, "regression")],
)
def test_larger_or_lost_likelihood_is_the_worse_one(value_a, value_b, verdict):
    def forced(value):
        changes = {"kind": "likelihood", "correct": None, "value": value, "se": 0.01}
        changes["nonfinite"] = int(value is None)
        return score_of(items_for(RIGHT)).model_copy(update=changes)

    (pair,) = compare_scores([forced(value_a)], (), [forced(value_b)], ())
    assert pair.verdict == verdict


def test_score_that_is_not_verified_is_never_the_same():
    items = items_for(RIGHT)
    plain_only = score_of(items, tokens_twin=0, tokens_plain=300)
    (pair,) = compare_scores([score_of(items)], items, [plain_only], items)
    assert pair.found.verdict == "not verified"
    assert pair.verdict == "inconclusive"
