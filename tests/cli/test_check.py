"""`cgprof check` from the command line to the run folder, on a small model with weights."""

import json

import pytest
from typer.testing import CliRunner

from cgprof.cli.app import app
from cgprof.cli.check import exit_code
from cgprof.record.store import read_items, read_run
from tests.support.checks import checked_run, greedy, plant, weights
from tests.support.model_dir import write_model_dir
from tests.support.runs import failed_graph, key

SMALL = (
    *("--cudagraph-capture-sizes", "1,4,8", "--dbo-decode-token-threshold", "4"),
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--max-model-len", "96"),
    *("--mode", "full-decode-only", "--dbo", "--device", "cpu"),
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model_dir(tmp_path_factory.mktemp("models") / "small")


def invoke(model, folder, *args):
    options = ["--model", str(model), "--output-dir", str(folder), *SMALL, *args]
    return CliRunner().invoke(app, ["check", *options])


def test_check_runs_every_leg_and_keeps_what_it_found(model_dir, tmp_path):
    folder = tmp_path / "run"
    result = invoke(model_dir, folder, "--limit", "40", "--format", "json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["verdict"] == "pass", document["reasons"]
    record = read_run(folder)
    assert record.status == "complete"
    assert all(row["parity_replays"] > 0 for row in document["keys"])
    assert record.check.greedy.passed is True
    assert record.check.weights.passed is True
    assert [score.phase for score in record.accuracy] == ["eager", "replay"]
    assert record.verdicts[0].items_different == 0
    assert len(read_items(folder)) == 80
    assert all(graph.replay is None for rank in record.ranks for graph in rank.graphs)


def test_planted_fault_is_found_as_stated_and_the_task_is_asked_too(model_dir, tmp_path):
    folder = tmp_path / "run"
    result = invoke(model_dir, folder, "--limit", "40", "--plant", "stale-output", "--sample")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("check: FAIL, partial: ")
    assert "as stated: yes" in result.stdout
    planted = read_run(folder).check.plant
    assert planted.as_stated
    assert "replay-eager" in planted.red
    assert planted.task.items_different > 0


def test_check_without_graphs_is_not_verified(tmp_path):
    args = ["--mode", "none", "--no-dbo", "--fail-on-inconclusive", "--load-format", "dummy"]
    result = invoke("tiny-dense", tmp_path / "run", *args)
    assert result.exit_code == 4, result.output
    assert result.stdout.startswith("check: not verified\n")
    assert "random weights: no task accuracy" in result.stdout


@pytest.mark.parametrize(
    "args",
    [
        ("--greedy-steps", "8"),
        ("--greedy-steps", "95"),
        ("--plant", "nothing"),
        ("--task", "absent.jsonl"),
    ],
)
def test_wrong_option_is_refused_before_anything_is_built(model_dir, tmp_path, args):
    folder = tmp_path / "run"
    result = invoke(model_dir, folder, *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert args[0] in result.stderr or args[1] in result.stderr
    assert not folder.exists()


@pytest.mark.parametrize(
    ("record", "code", "strict_code"),
    [
        (checked_run(), 0, 0),
        (checked_run(check={"weights": weights(passed=False)}), 1, 1),
        (checked_run(check={"greedy": greedy(passed=None, note="not verified")}), 0, 4),
        (checked_run((failed_graph(key(8)),)), 3, 3),
        (checked_run(check={"weights": weights(passed=False), "plant": plant()}), 0, 0),
        (checked_run(check={"plant": plant(as_stated=False)}), 1, 1),
    ],
)
def test_exit_code_follows_verdict_and_plant(record, code, strict_code):
    assert exit_code(record, fail_on_inconclusive=False) == code
    assert exit_code(record, fail_on_inconclusive=True) == strict_code
