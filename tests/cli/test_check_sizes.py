"""A check of every captured size names the one that is wrong; a check of some is called partial."""

import json

import pytest
from typer.testing import CliRunner

from cgprof.cli.app import app
from cgprof.record.store import read_run

LADDER = (1, 2, 4, 6, 8)
SMALL = (
    *("check", "--model", "tiny-dense", "--load-format", "dummy", "--mode", "full-decode-only"),
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--max-model-len", "96"),
    *("--cudagraph-capture-sizes", ",".join(map(str, LADDER)), "--device", "cpu"),
)


def check(folder, *args):
    return CliRunner().invoke(app, [*SMALL, "-o", str(folder), *args])


def red_keys(reasons):
    return [reason for reason in reasons if reason.startswith("FULL-")]


@pytest.mark.parametrize("size", [6, 8])
def test_fault_at_one_size_is_named_at_exactly_that_size(tmp_path, size):
    result = check(tmp_path / "run", "--plant", f"stale-output@{size}", "--format", "json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["verdict"] == "FAIL"
    assert red_keys(document["reasons"]) == [
        f"FULL-{size}x{size}q1: replay-eager, step-reference, poisoned-padding"
    ]
    assert len(read_run(tmp_path / "run").check.checked) == len(LADDER)


def test_sample_is_called_partial_and_a_size_outside_it_is_not_called_checked(tmp_path):
    result = check(tmp_path / "run", "--sample")
    assert result.exit_code == 0, result.output
    assert ", partial: 2 of 5 keys drawn with seed 0" in result.stdout.splitlines()[0]
    drawn = read_run(tmp_path / "run").check.checked
    outside = next(size for size in LADDER if f"FULL-{size}x{size}q1" not in drawn)
    result = check(tmp_path / "wrong", "--sample", "--plant", f"stale-output@{outside}")
    assert result.exit_code == 1, result.output
    assert "as stated: NO" in result.stdout
    row = next(
        line for line in result.stdout.splitlines() if line.startswith(f"FULL-{outside}x{outside}")
    )
    assert row.count("not checked") == 3


def test_size_that_is_not_captured_is_refused_before_anything_is_built(tmp_path):
    result = check(tmp_path / "run", "--plant", "stale-output@5")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "the captured sizes are 1-2, 4, 6, 8" in result.stderr
    assert not (tmp_path / "run").exists()
