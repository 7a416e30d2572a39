import numpy as np
import pytest

from cgprof.accuracy.likelihood import Forced
from cgprof.accuracy.score import (
    grade_text,
    score_both,
    score_choices,
    score_generation,
    score_likelihood,
    split_tokens,
)
from cgprof.accuracy.tasks import Item, Task
from cgprof.errors import ConfigError
from cgprof.record.scores import AccuracyResult, ItemScore
from cgprof.shapes import CapturePolicy
from tests.support.builders import captured_engine, tiny_run
from tests.support.tasks import character_tokenizer, random_task

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOKENIZER = character_tokenizer()
SCORERS = {"likelihood": score_likelihood, "multiple-choice": score_choices}
KINDS = ["generate", "likelihood", "multiple-choice"]


@pytest.fixture(scope="module")
def engine():
    with captured_engine(tiny_run(dbo=True)) as built:
        yield built


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_eager_and_replay_give_every_item_the_same_score(kind, device):
    task = random_task(kind, 12)
    with captured_engine(tiny_run(dbo=True, device=device)) as engine:
        eager, replay, verdict = score_both(engine, TOKENIZER, task)
    assert (verdict.a, verdict.b, verdict.items_different) == ("eager", "replay", 0)
    assert verdict.verdict == "inconclusive"  # twelve items are few
    assert replay.result.value == eager.result.value
    assert replay.result.verified is True
    assert replay.result.tokens_twin > 0
    assert sum(replay.result.replays.values()) > 0
    assert eager.result.replays == {}
    assert eager.result.tokens_twin == eager.result.tokens_plain == 0
    assert sum(replay.result.tokens_by_key.values()) == eager.result.tokens_eager


@pytest.mark.parametrize("kind", ["likelihood", "multiple-choice"])
def test_scores_that_are_not_finite_are_counted_and_kept_out_of_records(kind):
    with captured_engine(tiny_run()) as engine:
        next(iter(dict(engine.model.named_weights()).values()))[32:60].fill_(float("nan"))
        scored = SCORERS[kind](engine, TOKENIZER, random_task(kind, 6), "replay")
    assert scored.result.nonfinite == 6
    assert all(row.score is None for row in scored.items)
    assert scored.result.value == (None if kind == "likelihood" else 0.0)


def test_run_without_graphs_is_not_verified():
    with captured_engine(tiny_run(CapturePolicy.NONE)) as engine:
        _, replay, verdict = score_both(engine, TOKENIZER, random_task("likelihood", 4))
    assert replay.result.verified is False
    assert verdict.verdict == "not verified"


def test_twins_that_never_replay_leave_a_dbo_score_not_verified(engine):
    task = random_task("likelihood", 3)  # three requests stay below the threshold of four
    _, replay, verdict = score_both(engine, TOKENIZER, task)
    assert (replay.result.about, replay.result.tokens_twin) == ("twin", 0)
    assert replay.result.tokens_plain > 0
    assert verdict.verdict == "not verified"


def test_likelihood_of_a_task_is_that_of_its_tokens(engine):
    task = random_task("likelihood", 9)
    scored = score_likelihood(engine, TOKENIZER, task, "replay")
    result, rows = scored.result, scored.items
    tokens = sum(len(row.token_ids) for row in rows)
    assert tokens == sum(len(item.gold) for item in task.items)
    assert result.value == pytest.approx(-sum(row.score for row in rows) / tokens)
    assert result.perplexity == pytest.approx(np.exp(result.value))
    assert result.low < result.value < result.high
    assert result.correct is None
    assert all(row.output == row.gold and row.correct is None for row in rows)
    assert (result.n, result.seed, result.subset_rule) == (9, 0, "9 random texts")


def test_choice_is_the_best_by_length_and_the_rule_is_stated(engine):
    task = random_task("multiple-choice", 10, num_choices=3)
    flat = [
        Item(item_id=f"{i}.{j}", prompt=item.prompt, gold=choice)
        for i, item in enumerate(task.items)
        for j, choice in enumerate(item.choices)
    ]
    each = Task(
        name="each",
        kind="likelihood",
        items=tuple(flat),
        subset_rule="all",
        prompt_rule="zero-shot",
    )
    sums = {
        row.item_id: row.score for row in score_likelihood(engine, TOKENIZER, each, "eager").items
    }
    scored = score_choices(engine, TOKENIZER, task, "eager")
    right = 0
    for i, (item, row) in enumerate(zip(task.items, scored.items, strict=True)):
        values = [sums[f"{i}.{j}"] / len(choice) for j, choice in enumerate(item.choices)]
        assert row.choice_scores == pytest.approx(values)
        assert row.output == item.choices[int(np.argmax(values))]
        assert row.correct is (int(np.argmax(values)) == 0)
        assert (row.score > 0) is row.correct
        right += row.correct
    assert scored.result.correct == right
    assert scored.result.value == right / 10
    assert scored.result.scoring_rule == "best log-probability by characters"
    by_tokens = score_choices(engine, TOKENIZER, task, "eager", normalise="tokens")
    assert by_tokens.result.scoring_rule == "best log-probability by tokens"
    assert by_tokens.items == scored.items  # a token is a character here


def test_generated_answers_are_greedy_and_end_at_the_end_token(engine):
    task = random_task("generate", 8)
    free = score_generation(engine, TOKENIZER, task, "replay")
    assert {len(row.token_ids) for row in free.items} == {task.max_new_tokens}
    eos = free.items[0].token_ids[3]
    ended = score_generation(engine, character_tokenizer(eos), task, "replay")
    first = ended.items[0]
    stop = free.items[0].token_ids.index(eos)
    assert first.token_ids == free.items[0].token_ids[: stop + 1]
    assert chr(eos) not in first.output
    short = score_generation(engine, TOKENIZER, task, "replay", max_new_tokens=2)
    assert {len(row.token_ids) for row in short.items} == {2}


def test_right_wrong_and_missing_answers_are_counted_apart(engine):
    plain = random_task("generate", 6)
    texts = [row.output for row in score_generation(engine, TOKENIZER, plain, "eager").items]
    golds = [texts[0].strip(), "x", *(text.strip() for text in texts[2:])]
    items = [
        Item(item_id=item.item_id, prompt=item.prompt, gold=gold)
        for item, gold in zip(plain.items, golds, strict=True)
    ]
    task = Task(
        name="known",
        kind="generate",
        items=tuple(items),
        subset_rule="all",
        prompt_rule="zero-shot",
        max_new_tokens=plain.max_new_tokens,
    )
    result = score_generation(engine, TOKENIZER, task, "replay").result
    assert (result.correct, result.n, result.no_answer) == (5, 6, 0)
    assert result.low < 5 / 6 < result.high
    assert result.se == pytest.approx((5 / 6 * 1 / 6 / 6) ** 0.5)


def worded(**fields):
    known = {"match": "number", "stop": "\nQuestion:"}
    return random_task("generate", 1, **{**known, **fields})


@pytest.mark.parametrize(
    ("task", "text", "gold", "expected"),
    [
        (worded(), " 9 * 2 = 18\nQuestion: next\n 7", "18", "right"),
        (worded(), " eighteen\nQuestion: what is 18", "18", "no answer"),
        (worded(match="exact", stop=""), "001 ", "001", "right"),
        (worded(match="exact", stop=""), "1", "001", "wrong"),
        (worded(match="exact", stop=""), " ", "001", "no answer"),
    ],
)
def test_generated_text_is_graded_by_the_rules_of_its_task(task, text, gold, expected):
    assert grade_text(task, text, gold) == expected


def test_continuation_is_cut_where_the_prompt_ends():
    assert split_tokens(TOKENIZER, "ab", " c") == Forced(prompt=(97, 98), gold=(32, 99))
    for prompt, text in (("", "a"), ("a", "")):
        with pytest.raises(ConfigError):
            split_tokens(TOKENIZER, prompt, text)


def test_records_of_a_score_survive_json(engine):
    scored = score_choices(engine, TOKENIZER, random_task("multiple-choice", 4), "replay")
    again = AccuracyResult.model_validate_json(scored.result.model_dump_json())
    assert again == scored.result
    for row in scored.items:
        assert ItemScore.model_validate_json(row.model_dump_json()) == row
