import json

import pytest

from cgprof.accuracy.choice import CheckOptions, choose_task, sample_keys
from cgprof.config.model_card import load_model_card
from cgprof.errors import ConfigError
from tests.support.builders import build_engine, tiny_model, tiny_run
from tests.support.model_dir import write_model_dir


@pytest.fixture
def model_dir(tmp_path):
    return write_model_dir(tmp_path / "model")


def test_random_weights_have_no_task_and_say_so():
    choice = choose_task(tiny_model())
    assert choice.task is None
    assert choice.note == "random weights: no task accuracy"
    with pytest.raises(ConfigError, match="random weights"):
        choose_task(tiny_model(), "arithmetic")


def test_model_that_did_not_learn_arithmetic_is_scored_by_likelihood(model_dir):
    choice = choose_task(load_model_card(str(model_dir)), limit=5, seed=3)
    assert (choice.task.name, choice.task.kind) == ("arithmetic", "likelihood")
    assert len(choice.task.items) == 5
    assert choice.task.seed == 3
    assert choice.tokenizer is not None


def test_model_with_a_training_record_has_to_answer(model_dir):
    (model_dir / "training.json").write_text("{}")
    model = load_model_card(str(model_dir))
    assert choose_task(model).task.kind == "generate"
    assert choose_task(model, kind="likelihood").task.kind == "likelihood"


def test_task_of_a_path_is_taken(model_dir, tmp_path):
    rows = [{"question": f"{n}+{n}", "answer": f"#### {2 * n}"} for n in range(8)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    task = choose_task(load_model_card(str(model_dir)), str(path), limit=3).task
    assert (task.name, task.kind, len(task.items)) == ("rows", "generate", 3)


def test_weights_without_a_tokenizer_have_no_task_unless_one_is_named(tmp_path):
    model = load_model_card(str(write_model_dir(tmp_path / "model", tokenizer=False)))
    assert "tokenizer" in choose_task(model).note
    with pytest.raises(ConfigError, match="tokenizer"):
        choose_task(model, "arithmetic")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (CheckOptions(greedy_steps=8), "--greedy-steps"),
        (CheckOptions(greedy_steps=4000), "--max-model-len"),
        (CheckOptions(plant="nothing"), "--plant"),
        (CheckOptions(plant="stale-twin-half"), "add --dbo"),
        (CheckOptions(plant="stale-output@3"), "the captured sizes are 1-2, 4, 8"),
    ],
)
def test_wrong_options_are_refused_before_an_engine_exists(options, word):
    with pytest.raises(ConfigError, match=word):
        options.validate(tiny_run(), tiny_model())


def test_sample_is_a_quarter_of_each_kind_seeded_and_in_order():
    engine = build_engine(tiny_run(dbo=True, sizes=tuple(range(1, 9))))
    keys = engine.plan.keys
    engine.close()
    drawn = sample_keys(keys, 0)
    assert drawn == sample_keys(keys, 0)
    assert [key for key in keys if key in drawn] == list(drawn)
    twins = [key for key in keys if key.is_twin]
    assert sum(key.is_twin for key in drawn) == -(-len(twins) // 4)
    assert sum(not key.is_twin for key in drawn) == -(-(len(keys) - len(twins)) // 4)
    assert len({sample_keys(keys, seed) for seed in range(8)}) > 1
