"""A plan that is less than what was asked for: printed always, refused with --strict."""

import json

import pytest
from typer.testing import CliRunner

from cgprof.cli.app import app

CUT_OFF = [(12, 8, "9-12"), (20, 16, "17-20"), (300, 288, "289-300")]


def plan(max_num_seqs, *args):
    return CliRunner().invoke(app, ["plan", "--max-num-seqs", str(max_num_seqs), *args])


@pytest.mark.parametrize("max_num_seqs", [12, 20, 300])
@pytest.mark.parametrize("most", [(), ("--max-cudagraph-capture-size", "300")])
def test_whole_ladder_covers_every_decode_batch(max_num_seqs, most):
    result = plan(max_num_seqs, *most)
    assert result.exit_code == 0
    assert f"every decode batch of 1-{max_num_seqs} requests has a graph" in result.stdout
    if not most or max_num_seqs == 300:
        assert plan(max_num_seqs, *most, "--strict").exit_code == 0


@pytest.mark.parametrize(("max_num_seqs", "most", "uncovered"), CUT_OFF)
def test_ladder_without_its_top_names_the_batches_and_strict_refuses(max_num_seqs, most, uncovered):
    args = ("--max-cudagraph-capture-size", str(most))
    result = plan(max_num_seqs, *args)
    assert result.exit_code == 0
    assert f"decode batches {uncovered} have no graph and run eager" in result.stdout
    document = json.loads(plan(max_num_seqs, *args, "--format", "json").stdout)
    assert document["plan"]["uncovered_batches"] == list(range(most + 1, max_num_seqs + 1))
    strict = plan(max_num_seqs, *args, "--strict")
    assert (strict.exit_code, strict.stdout) == (2, "")
    assert "--strict" in strict.stderr
    assert f"decode batches {uncovered} would run eager" in strict.stderr
    assert len(strict.stderr.splitlines()) == 1


def test_json_has_requested_and_effective_mode_of_every_key():
    args = ("--mode", "full-decode-only", "--cudagraph-capture-sizes", "8,16")
    plan_record = json.loads(plan(8, *args, "--format", "json").stdout)["plan"]
    assert plan_record["modes"] == [
        {"label": "FULL-8x8q1", "requested": "FULL", "effective": "FULL", "reason": ""},
        {
            "label": "FULL-16",
            "requested": "FULL",
            "effective": "NONE",
            "reason": "no decode step is so large: max_num_seqs is 8",
        },
    ]


def test_strict_capture_is_refused_before_anything_is_built(tmp_path):
    folder = tmp_path / "run"
    args = ["capture", "--strict", "--max-num-seqs", "12", "--cudagraph-capture-sizes", "8"]
    result = CliRunner().invoke(app, [*args, "--mode", "full-decode-only", "-o", str(folder)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "decode batches 9-12 would run eager" in result.stderr
    assert not folder.exists()


@pytest.mark.parametrize("args", [("--all2all", "deepep"), ("--set", "microbatch.all2all=deepep")])
def test_exchange_backend_that_does_not_exist_is_refused_by_the_name_of_its_option(args):
    result = plan(8, "--dbo", *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "all2all" in result.stderr
