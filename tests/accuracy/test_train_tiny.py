import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cgprof.accuracy.arithmetic import problems
from cgprof.accuracy.train_tiny import count_right, train
from cgprof.config.bundled import bundled_folder
from cgprof.config.load import load_run
from cgprof.config.model_card import load_model_card
from cgprof.models.differentiable import DifferentiableDecoder
from cgprof.models.tokenizer import Tokenizer

BUNDLED = bundled_folder("models") / "tiny-moe"
MOST_BYTES = 8_000_000
FILES = ("config.json", "model.safetensors", "tokenizer.json", "training.json")


@pytest.fixture(autouse=True)
def _gradients(_inference_mode):
    with torch.inference_mode(False):
        yield


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def held_out_texts(count):
    return [p.question + p.answer for p in problems(count, seed=9, split="held-out")]


def test_bundled_model_answers_held_out_problems_through_the_engine():
    asked = problems(300, seed=9, split="held-out")
    assert count_right(BUNDLED, asked, device="cpu") >= 0.9 * len(asked)


def test_bundled_model_is_small_and_its_record_is_of_these_weights():
    assert sorted(path.name for path in BUNDLED.iterdir()) == list(FILES)
    assert sum(path.stat().st_size for path in BUNDLED.iterdir()) <= MOST_BYTES
    weights, record = BUNDLED / "model.safetensors", read_json(BUNDLED / "training.json")
    assert record["weights_sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert record["held_out"]["accuracy"] >= 0.9


def test_bundled_model_runs_by_its_name():
    _, model = load_run(None, "tiny-moe")
    assert (model.family, model.dtype) == ("qwen3_moe", "float32")
    assert Path(model.directory) == BUNDLED
    assert model.weights is not None
    assert model.max_positions >= 4096


def test_bundled_model_sends_tokens_to_every_expert():
    weights = load_file(BUNDLED / "model.safetensors")
    decoder = DifferentiableDecoder(load_model_card("tiny-moe"), torch.device("cpu"))
    tokenizer = Tokenizer.load(BUNDLED)
    rows = [tokenizer.encode(text) for text in held_out_texts(200)]
    tokens = torch.tensor([[*row, *[tokenizer.eos_id] * (16 - len(row))] for row in rows])
    _, imbalance = decoder.forward(weights, tokens)
    assert imbalance.item() < 1.3  # 4 is where two of the eight experts take all


def test_tokens_are_characters_and_come_back():
    tokenizer = Tokenizer.load(BUNDLED)
    text = "".join(map(chr, range(32, 127))) + "\n"
    assert tokenizer.encode(text) == [ord(character) for character in text]
    assert tokenizer.decode([*tokenizer.encode(text), tokenizer.eos_id]) == text
    assert tokenizer.eos_id == 0
    assert tokenizer.encode("1\u00e92") == [ord("1"), 1, ord("2")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "model"
    lines: list[str] = []
    train(folder, device="cpu", steps=3, seed=0, progress=lines.append, held_out=40)
    return folder, lines


def test_training_writes_a_folder_that_loads_and_its_record(trained):
    folder, lines = trained
    assert sorted(path.name for path in folder.iterdir()) == list(FILES)
    record = read_json(folder / "training.json")
    assert (record["steps"], record["seed"], record["device"]) == (3, 0, "cpu")
    assert record["held_out"]["problems"] == 40
    assert record["held_out"]["right"] < 20  # three steps teach nothing
    stored = (folder / "model.safetensors").read_bytes()
    assert record["weights_sha256"] == hashlib.sha256(stored).hexdigest()
    assert lines[-1].startswith("held-out problems answered right by the engine: ")


def test_training_repeats_with_the_seed(trained, tmp_path):
    folder, _ = trained
    for seed, same in ((0, True), (1, False)):
        train(tmp_path, device="cpu", steps=3, seed=seed, progress=lambda text: None, held_out=1)
        stored = (tmp_path / "model.safetensors").read_bytes()
        assert ((folder / "model.safetensors").read_bytes() == stored) is same


def test_bundled_card_is_the_one_that_training_writes(trained):
    folder, _ = trained
    for name in ("config.json", "tokenizer.json"):
        assert (folder / name).read_bytes() == (BUNDLED / name).read_bytes()
