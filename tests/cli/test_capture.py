from datetime import datetime

import pytest
from typer.testing import CliRunner

from cgprof.cli.app import app
from cgprof.cli.capture import exit_code
from cgprof.config.load import load_run
from cgprof.errors import DeviceError
from cgprof.record.graph import GraphRecord, ParityResult
from cgprof.record.place import Environment
from cgprof.record.store import read_run
from cgprof.record.types import Failure, PlanRecord, RankRecord, RunRecord
from cgprof.shapes import CapturePolicy, GraphKey, RuntimeMode
from tests.support.checks import checked_run, verdict
from tests.support.model_dir import write_model_dir


def record(*graphs: GraphRecord, failures: tuple[Failure, ...] = ()) -> RunRecord:
    run, model = load_run()
    return RunRecord(
        run_id="run",
        status="complete",
        recorder="tape",
        started_at="2020-01-01T00:00:00Z",
        config=run,
        config_fingerprint="0",
        model=model,
        plan=PlanRecord(
            requested_policy=CapturePolicy.FULL,
            policy=CapturePolicy.FULL,
            labels=tuple(graph.label for graph in graphs),
            fingerprint="0",
        ),
        environment=Environment(cgprof="0", python="3", torch="2", hostname="h", platform="p"),
        ranks=(RankRecord(graphs=graphs),),
        failures=failures,
    )


def graph(passed: bool | None, failure: str | None = None) -> GraphRecord:
    leg = ParityResult(leg="replay-eager", passed=passed, bitwise_equal=bool(passed))
    key = GraphKey(mode=RuntimeMode.FULL, num_tokens=8, num_reqs=8)
    return GraphRecord(key=key, label=str(key), parity=(leg,), failure=failure)


@pytest.mark.parametrize(
    ("graphs", "code"),
    [
        ([], 0),
        ([graph(True), graph(None)], 0),
        ([graph(True), graph(False)], 1),
        ([graph(True), graph(None, "no kernel")], 3),
        ([graph(False), graph(None, "no kernel")], 3),
    ],
)
def test_exit_code_follows_the_record(graphs, code):
    assert exit_code(record(*graphs)) == code


def test_failure_outside_a_key_is_a_failure():
    failure = Failure(where="profile", error="DeviceError", message="lost")
    assert exit_code(record(graph(True), failures=(failure,))) == 3


def test_other_answers_by_replay_than_eager_are_a_failed_check():
    assert exit_code(checked_run()) == 0
    assert exit_code(checked_run(verdicts=(verdict("different"),))) == 1


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("--model", "MODEL"), "negative log-likelihood a token of arithmetic, n 200: eager "),
        (("--model", "MODEL", "--max-model-len", "4", "--block-size", "4"), "no task accuracy: "),
        (("--model", "tiny-dense", "--load-format", "dummy"), "random weights: no task accuracy"),
    ],
)
def test_capture_prints_one_accuracy_line_or_why_there_is_none(tmp_path, args, line):
    model = str(write_model_dir(tmp_path / "model"))
    options = ["--cudagraph-capture-sizes", "32", "--max-num-seqs", "32", "--no-parity"]
    options += ["--max-model-len", "64", "--device", "cpu", "--set", "measure.context_len=2"]
    options += ["--output-dir", str(tmp_path / "run")]
    given = [model if arg == "MODEL" else arg for arg in args]
    result = CliRunner().invoke(app, ["capture", *options, *given])
    assert result.exit_code == 0, result.output
    assert sum(line in text for text in result.stdout.splitlines()) == 1


def test_refused_run_captures_nothing_and_leaves_no_folder(tmp_path):
    folder = tmp_path / "run"
    args = ["capture", "--model", "tiny-dense", "--dbo", "--output-dir", str(folder)]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2
    assert "no experts in this config" in result.stderr
    assert result.stdout == ""
    assert not folder.exists()


@pytest.mark.parametrize("args", [["report", "absent"], ["compare", "absent", "absent"]])
def test_absent_run_folder_is_one_line_and_exit_code_2(args, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "absent" in result.stderr
    assert len(result.stderr.splitlines()) == 1


_QUICK = (
    *("capture", "--model", "tiny-dense", "--device", "cpu", "--mode", "none", "--no-parity"),
    *("--max-model-len", "96", "--max-num-seqs", "4"),
)


def test_run_that_cannot_start_keeps_the_older_one_and_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "summary.json").write_text("{}")

    def refuse(*_args):
        raise DeviceError("no device")

    monkeypatch.setattr("cgprof.run.Engine", refuse)
    assert CliRunner().invoke(app, [*_QUICK, "-o", str(folder), "--force"]).exit_code == 3
    assert (folder / "summary.json").read_text() == "{}"
    assert CliRunner().invoke(app, [*_QUICK]).exit_code == 3
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_run_whose_serving_fails_is_a_failed_run(tmp_path, monkeypatch):
    def refuse(*_args):
        raise DeviceError("lost")

    monkeypatch.setattr("cgprof.job.serve", refuse)
    result = CliRunner().invoke(app, [*_QUICK, "-o", str(tmp_path / "run")])
    assert result.exit_code == 3, result.output
    assert read_run(tmp_path / "run").status == "failed"


def test_default_runs_of_one_second_get_folders_and_names_of_their_own(tmp_path, monkeypatch):
    class Frozen(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime(2020, 1, 1, tzinfo=tz)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cgprof.run.datetime", Frozen)
    for _ in range(2):
        result = CliRunner().invoke(app, _QUICK)
        assert result.exit_code == 0, result.output
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names == ["20200101T000000Z_tiny-dense_none", "20200101T000000Z_tiny-dense_none_2"]
    assert [read_run(tmp_path / "runs" / name).run_id for name in names] == names
