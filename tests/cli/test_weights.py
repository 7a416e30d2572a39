import json

import pytest
from typer.testing import CliRunner

from cgprof.cli.app import app
from tests.support.checkpoints import LLAMA, save_model
from tests.support.gguf_files import write_gguf

pytest.importorskip("gguf")


def run(*args):
    return CliRunner().invoke(app, [*map(str, args)])


@pytest.fixture
def gguf(tmp_path):
    original = tmp_path / "original"
    original.mkdir()
    write_gguf(tmp_path / "tiny.gguf", save_model(original, LLAMA), LLAMA)
    return tmp_path / "tiny.gguf"


def test_written_directory_is_planned_and_generates(tmp_path, gguf):
    made = tmp_path / "made"
    done = run("weights", "smollm2", made, "--gguf", gguf, "--slice-experts", 4)
    assert (done.exit_code, done.stdout) == (0, f"{made}\n")
    planned = run("plan", "--model", made, "--dbo", "--format", "json")
    model = json.loads(planned.stdout)["model"]
    assert (model["family"], model["num_experts"], model["uniform_routing"]) == (
        "llama_moe",
        4,
        True,
    )
    assert model["weights"].startswith("sha256:")
    args = ("generate", "--model", made, "-p", "the", "--max-tokens", 3, "--device", "cpu")
    assert run(*args, "--mode", "none").exit_code == 0


def test_directory_in_use_is_not_overwritten_without_force(tmp_path, gguf):
    made = tmp_path / "made"
    made.mkdir()
    assert run("weights", "smollm2", made, "--gguf", gguf).exit_code == 0
    done = run("weights", "smollm2", made, "--gguf", gguf)
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1)
    assert "--force" in done.stderr
    assert run("weights", "smollm2", made, "--gguf", gguf, "--force").exit_code == 0
    assert run("weights", "smollm2", gguf, "--gguf", gguf).exit_code == 2


def test_wrong_use_is_2(tmp_path, gguf):
    made = tmp_path / "made"
    for args in (
        ("qwen", made),
        ("smollm2", made, "--gguf", tmp_path / "absent.gguf"),
        ("smollm2", made, "--gguf", gguf, "--slice-experts", 3),
        ("smollm2", made, "--gguf", gguf, "--slice-experts", 1),
    ):
        assert run("weights", *args).exit_code == 2
    assert not made.exists()
