import json

import pytest

from cgprof.accuracy.answers import extract_answer, grade
from cgprof.accuracy.shots import EXAMPLES
from cgprof.accuracy.tasks import load_task
from cgprof.errors import ConfigError


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return str(path)


@pytest.fixture
def worded(tmp_path):
    rows = [{"question": f"How many is {n}?", "answer": f"It is {n}.\n#### {n}"} for n in range(20)]
    return write(tmp_path / "worded.jsonl", rows)


@pytest.fixture
def choices(tmp_path):
    rows = [{"goal": f"g{n}", "sol1": "left", "sol2": "right", "label": n % 2} for n in range(6)]
    return write(tmp_path / "choices.jsonl", rows)


def test_worded_problems_are_generated_after_fixed_examples(worded):
    task = load_task(worded)
    assert (task.name, task.kind, len(task.items)) == ("worded", "generate", 20)
    assert (task.subset_rule, task.seed, task.match) == ("all 20", None, "number")
    item = task.items[3]
    assert (item.item_id, item.gold) == ("3", "3")
    assert item.prompt.count("Question:") == len(EXAMPLES) + 1
    assert item.prompt.endswith("\n\nQuestion: How many is 3?\nAnswer:")
    assert task.prompt_rule == f"{len(EXAMPLES)} of {len(EXAMPLES)} fixed examples first"
    assert load_task(worded, shots=0).items[3].prompt == "Question: How many is 3?\nAnswer:"


def test_worded_problems_serve_for_likelihood_without_examples(worded):
    task = load_task(worded, kind="likelihood")
    assert (task.kind, task.prompt_rule) == ("likelihood", "zero-shot")
    assert task.items[3].prompt == "Question: How many is 3?\nAnswer:"
    assert task.items[3].gold == " It is 3.\n#### 3"


def test_subset_is_the_first_items_or_drawn_by_a_seed_and_says_so(worded):
    first = load_task(worded, limit=5)
    assert [item.item_id for item in first.items] == ["0", "1", "2", "3", "4"]
    assert (first.subset_rule, first.seed) == ("first 5 of 20", None)
    drawn = load_task(worded, limit=5, seed=3)
    assert (drawn.subset_rule, drawn.seed) == ("5 of 20 drawn with seed 3", 3)
    assert drawn == load_task(worded, limit=5, seed=3)
    ids = [int(item.item_id) for item in drawn.items]
    assert ids == sorted(set(ids))
    assert ids != [0, 1, 2, 3, 4]
    assert drawn.items != load_task(worded, limit=5, seed=4).items
    assert load_task(worded, limit=50).subset_rule == "all 20"


def test_multiple_choice_rows_are_recognised(choices):
    task = load_task(choices)
    assert (task.kind, len(task.items)) == ("multiple-choice", 6)
    assert task.items[1].choices == (" left", " right")
    assert [item.gold for item in task.items[:2]] == [" left", " right"]


def test_arithmetic_is_held_out_and_compared_exactly():
    task = load_task("arithmetic", limit=30, seed=5)
    assert (task.kind, len(task.items), task.seed, task.match) == ("generate", 30, 5, "exact")
    assert task.subset_rule == "30 held-out problems generated with seed 5"
    assert len({item.item_id for item in task.items}) == 30
    assert task.max_new_tokens > max(len(item.gold) for item in task.items)
    assert load_task("arithmetic").subset_rule.startswith("200 held-out problems")
    forced = load_task("arithmetic", kind="likelihood", limit=3)
    assert forced.items[0].gold == load_task("arithmetic", limit=3).items[0].gold


def test_own_examples_are_solved_right():
    for question, answer in EXAMPLES:
        assert question.endswith("?")
        before, _, final = answer.partition("####")
        assert extract_answer(before.rstrip()) is not None
        assert grade(answer, final) == "right"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "empty"),
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"question": "q", "answer": "no mark 5"}', "does not end in"),
        ('{"question": "q", "answer": "#### none"}', "does not end in"),
        ('{"question": 1, "answer": "#### 5"}', "must both be text"),
        ('{"text": "q"}', "needs goal"),
    ],
)
def test_file_that_cannot_be_read_is_refused_with_its_place(tmp_path, text, problem):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem) as error:
        load_task(str(path))
    assert str(path) in str(error.value)


def test_missing_file_and_unknown_wishes_are_refused(tmp_path, worded, choices):
    for wish in (
        {"name_or_path": str(tmp_path / "none.jsonl")},
        {"name_or_path": str(tmp_path)},
        {"name_or_path": worded, "kind": "multiple-choice"},
        {"name_or_path": choices, "kind": "generate"},
        {"name_or_path": "arithmetic", "kind": "multiple-choice"},
        {"name_or_path": worded, "limit": 0},
        {"name_or_path": worded, "shots": len(EXAMPLES) + 1},
    ):
        with pytest.raises(ConfigError):
            load_task(**wish)
