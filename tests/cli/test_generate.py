import inspect
import json

from typer.testing import CliRunner

from cgprof.cli.app import app
from cgprof.cli.generate import generate
from cgprof.config.flags import FLAGS
from tests.support.checkpoints import LLAMA, save_model, save_tokenizer

NOT_MEASURED = {"parity", "dbo_worth"}


def run(*args):
    return CliRunner().invoke(app, ["generate", "--device", "cpu", *map(str, args)])


def save(folder):
    save_model(folder, LLAMA)
    save_tokenizer(folder)
    return folder


def test_flags_of_a_run_are_options_of_the_command():
    names = {flag.lstrip("-").replace("-", "_") for flag in FLAGS.values()} - NOT_MEASURED
    assert names <= inspect.signature(generate).parameters.keys()


def test_json_and_text_show_the_same_completions(tmp_path):
    args = ("--model", save(tmp_path), "-p", "the cat", "--prompt", "a", "--max-tokens", 6)
    done = run(*args, "--format", "json")
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    texts = [completion["text"] for completion in document["completions"]]
    assert [completion["prompt"] for completion in document["completions"]] == ["the cat", "a"]
    assert document["replayed_steps"] > 0
    assert run(*args).stdout == "".join(f"{text}\n" for text in texts)
    eager = run(*args, "--mode", "none")
    assert eager.stdout == "".join(f"{text}\n" for text in texts)
    assert "0 graphs, 0 steps replayed" in eager.stderr


def test_seed_and_temperature_reach_the_sampler(tmp_path):
    args = ("--model", save(tmp_path), "-p", "a", "--temperature", 1.0, "--mode", "none")
    assert run(*args, "--seed", 1).stdout == run(*args, "--seed", 1).stdout
    assert run(*args, "--seed", 1).stdout != run(*args, "--seed", 2).stdout


def test_wrong_use_is_one_line_and_2(tmp_path):
    save(tmp_path)
    assert run("--model", tmp_path).exit_code == 2
    assert run("--model", tmp_path, "-p", "a", "--max-tokens", 0).exit_code == 2
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    done = run("--model", tmp_path, "-p", "a")
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1)
    assert "model.safetensors" in done.stderr
    done = run("--model", tmp_path, "-p", "a", "--load-format", "dummy", "--mode", "none")
    assert done.exit_code == 0
