"""Runs that are killed, interrupted or refused, and what goes on with them in a new process."""

import json
import os
import re
import signal

import pytest
from typer.testing import CliRunner

from cgprof.cli.app import app
from cgprof.record.lock import LOCK
from cgprof.record.store import read_items, read_run, read_samples
from tests.support.children import end_at, start, wait_for_line
from tests.support.model_dir import write_model_dir

SMALL = (
    *("--cudagraph-capture-sizes", "1,4", "--dbo-decode-token-threshold", "4"),
    *("--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--max-model-len", "96"),
    *("--mode", "full-decode-only", "--dbo", "--device", "cpu"),
    *("--set", "measure.max_samples=5", "--set", "measure.min_samples=5"),
)
NO_TASK = ("--load-format", "dummy")
# Values of these depend on the clock or on the process; their place in the record does not.
CLOCK = re.compile(r".*(_ns|noise|outliers|stopped_by|count|samples|process_id)$")
OF_THE_PROCESS = {
    "notes",
    "process_seconds",
    "processes",
    "started_at",
    "run_id",
    "run",
    "warnings",
    "remark",
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    model = write_model_dir(tmp_path_factory.mktemp("models") / "small")
    return ("--model", str(model), *SMALL)


@pytest.fixture(scope="module")
def undisturbed(settings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    result = invoke(*settings, "-o", str(folder))
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture(scope="module")
def undisturbed_without_task(settings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    result = invoke(*settings, *NO_TASK, "-o", str(folder))
    assert result.exit_code == 0, result.output
    return folder


def invoke(*args):
    return CliRunner().invoke(app, ["capture", *args])


def skeleton(value, name=""):
    """A record with what the clock says reduced to its type."""
    if isinstance(value, dict):
        return {key: skeleton(one, key) for key, one in value.items() if key not in OF_THE_PROCESS}
    if isinstance(value, list):
        return [skeleton(one, name) for one in value]
    if CLOCK.match(name) or name == "replays":
        return type(value).__name__
    return value


def document(folder):
    return json.loads((folder / "summary.json").read_text())


def table(folder, name):
    """A table of a report: its columns and rows, with what the clock says left out."""
    result = CliRunner().invoke(app, ["report", str(folder), "--table", name, "--format", "json"])
    assert result.exit_code == 0, result.output
    return [
        skeleton({column: cell for column, cell in row.items() if not column.endswith("_ratio")})
        for row in json.loads(result.stdout)
    ]


def says_partial(folder, other):
    assert read_run(folder).status == "partial"
    report = CliRunner().invoke(app, ["report", str(folder)])
    assert report.exit_code == 0, report.output
    assert "run is partial" in report.stdout
    for pair in ((folder, other), (other, folder)):
        compared = CliRunner().invoke(app, ["compare", *map(str, pair)])
        assert compared.exit_code in (0, 1), compared.output
        assert "partial" in compared.stdout


@pytest.mark.parametrize(
    ("moment", "by", "finished", "task"),
    [
        ("capture 2/3", signal.SIGKILL, (0, 0), None),
        ("profile 3/3", signal.SIGKILL, (2, 0), None),
        ("profile 3 keys in turn", signal.SIGINT, (3, 0), None),
        ("parity 3/3", signal.SIGKILL, (3, 2), "scored again"),
        ("serving", signal.SIGKILL, (3, 3), "kept"),
    ],
)
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_run_that_was_cut_off_is_partial_and_goes_on_to_what_an_undisturbed_one_finds(
    settings, request, tmp_path, moment, by, finished, task
):
    folder = tmp_path / "run"
    more = () if task else NO_TASK
    whole = request.getfixturevalue("undisturbed" if task else "undisturbed_without_task")
    cut = end_at(["capture", *settings, *more, "-o", str(folder)], moment, by)
    assert cut.stdout == ""
    if by is signal.SIGINT:
        assert (cut.code, cut.stderr.splitlines()[-1]) == (130, "interrupted")
        assert "Traceback" not in cut.stderr
    else:
        assert cut.code == -signal.SIGKILL
    assert (folder / LOCK).exists() is (by is signal.SIGKILL)
    says_partial(folder, whole)
    before = read_run(folder)

    result = invoke("--resume", str(folder))
    assert result.exit_code == 0, result.output
    record = read_run(folder)
    assert (record.status, record.run_id) == ("complete", before.run_id)
    assert [one.process_id for one in record.processes] == [cut.process_id, os.getpid()]
    graphs = record.ranks[0].graphs
    assert {graph.capture_process_id for graph in graphs} == {os.getpid()}
    of_cut = [
        sum(getattr(graph, name) == cut.process_id for graph in graphs)
        for name in ("timing_process_id", "parity_process_id")
    ]
    assert of_cut[0] >= finished[0]  # timed
    assert of_cut[1] >= finished[1]  # checked
    assert f"profile {3 - of_cut[0]}/{3 - of_cut[0]} " in result.stderr or of_cut[0] == 3
    if task:
        scorer = cut.process_id if task == "kept" else os.getpid()
        assert {score.process_id for score in record.accuracy} == {scorer}
    for old in before.ranks[0].graphs:
        new = next(graph for graph in graphs if graph.key == old.key)
        if old.replay is not None:
            assert (new.eager, new.replay) == (old.eager, old.replay)
        assert old.parity in ((), new.parity)
    check_samples(folder, whole)
    assert skeleton(document(folder)) == skeleton(document(whole))
    assert read_items(folder) == read_items(whole)
    for name in ("keys", "stages", "memory", "parity", "totals", "graphs", "captures", "accuracy"):
        assert table(folder, name) == table(whole, name), name
    assert not (folder / LOCK).exists()


def check_samples(folder, whole):
    """As many series as an undisturbed run has, each of one process, none of them twice."""
    samples, wanted = read_samples(folder), read_samples(whole)
    by = ["key", "phase"]
    counts = samples.groupby(by, observed=True).size()
    expected = wanted.groupby(by, observed=True).size()
    assert set(counts.index) == set(expected.index)
    for phase in ("first", "round-robin"):
        alike = [one.xs(phase, level="phase") for one in (counts, expected)]
        assert alike[0].to_dict() == alike[1].to_dict()
    for graph in read_run(folder).ranks[0].graphs:
        of_key = samples[samples["key"] == graph.label]
        for phases, process_id in (
            (("eager", "first", "hot"), graph.timing_process_id),
            (("round-robin",), graph.round_robin_process_id),
        ):
            assert set(of_key[of_key["phase"].isin(phases)]["process_id"]) == {process_id}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_resume_is_the_only_writer_and_when_it_is_killed_loses_nothing(settings, tmp_path):
    folder = tmp_path / "run"
    first = end_at(["capture", *settings, *NO_TASK, "-o", str(folder)], "parity 2/3")
    with start(["capture", "--resume", str(folder)]) as second:
        wait_for_line(second, "capture 3/3")
        second.send_signal(signal.SIGSTOP)
        try:
            for args in (("--resume", str(folder)), (*settings, "-o", str(folder), "--force")):
                refused = invoke(*args)
                assert (refused.exit_code, refused.stdout) == (2, "")
                assert f"is being written by process {second.pid} on " in refused.stderr
                assert len(refused.stderr.splitlines()) == 1
        finally:
            second.kill()
    record = read_run(folder)
    assert record.status == "partial"
    assert [one.process_id for one in record.processes] == [first.process_id, second.pid]
    graphs = record.ranks[0].graphs
    assert [graph.timing_process_id for graph in graphs] == [first.process_id] * 3
    assert {graph.capture_process_id for graph in graphs} == {second.pid, None}
    for graph in graphs:
        assert (graph.memory is None) is (graph.capture_process_id is None)
        assert (graph.capture_ns is None) is (graph.capture_process_id is None)
    assert CliRunner().invoke(app, ["report", str(folder)]).exit_code == 0
    result = invoke("--resume", str(folder))
    assert result.exit_code == 0, result.output
    whole = read_run(folder)
    assert {g.timing_process_id for g in whole.ranks[0].graphs} == {first.process_id}
    assert len(whole.processes) == 3


def test_complete_run_has_nothing_to_resume(undisturbed):
    before = (undisturbed / "summary.json").read_text()
    result = invoke("--resume", str(undisturbed))
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.startswith(f"nothing to resume: {undisturbed} is complete")
    assert (undisturbed / "summary.json").read_text() == before
    assert not (undisturbed / LOCK).exists()


@pytest.fixture
def cut_off(undisturbed, tmp_path):
    """A run that was cut off before its last write."""
    return rewritten(undisturbed, tmp_path / "run", lambda summary: None)


def rewritten(folder, to, change):
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    summary = document(folder) | {"status": "partial"}
    change(summary)
    (to / "summary.json").write_text(json.dumps(summary))
    return to


def test_resume_takes_the_settings_of_the_run_or_the_same_again(settings, cut_off):
    result = invoke("--resume", str(cut_off), *settings)
    assert result.exit_code == 0, result.output
    record = read_run(cut_off)
    assert record.status == "complete"
    assert "profile 1/" not in result.stderr
    assert "parity 1/" not in result.stderr
    assert "task" not in result.stderr
    assert "resumed by process" in record.notes[-1]


def set_in(*path, value):
    def change(summary):
        node = summary
        for part in path[:-1]:
            node = node[part]
        node[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_in("config", "seed", value=7), "seed is 0 here and 7 in that run"),
        (
            set_in("config", "limits", "max_num_seqs", value=6),
            "limits.max_num_seqs is 4 here and 6 in that run",
        ),
        (set_in("model", "num_layers", value=3), "model.num_layers is 2 here and 3 in that run"),
        (
            set_in("model", "weights", value="sha256:0"),
            r"model.weights is sha256:\w+ here and sha256:0 in that run",
        ),
        (set_in("plan", "fingerprint", value="beef"), r"plan is \w+ here and beef in that run"),
        (
            set_in("environment", "cgprof", value="0.0.9"),
            r"cgprof is .* here and 0.0.9 in that run",
        ),
        (set_in("environment", "code", value=None), r"code is \w+ here and none in that run"),
        (set_in("environment", "torch", value="2.0"), r"torch is .* here and 2.0 in that run"),
        (set_in("environment", "cpu", value="Z80"), r"cpu is .* here and Z80 in that run"),
        (
            set_in("environment", "variables", "OMP_NUM_THREADS", value="77"),
            r"variables.OMP_NUM_THREADS is .* here and 77 in that run",
        ),
        (set_in("recorder", value="cuda"), "recorder is tape here and cuda in that run"),
        (
            set_in(
                *("environment", "device"),
                value={"index": 0, "name": "NVIDIA H200", "uuid": "GPU-1", "driver": "580"},
            ),
            "device is none here and NVIDIA H200 in that run, and 2 more differ",
        ),
        (set_in("command", value="check"), "was written by cgprof check"),
    ],
)
def test_resume_elsewhere_or_of_another_run_is_one_line(
    undisturbed, settings, tmp_path, change, said
):
    folder = rewritten(undisturbed, tmp_path / "run", change)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    result = invoke("--resume", str(folder), *settings)
    assert (result.exit_code, result.stdout) == (2, "")
    *_, line = result.stderr.splitlines()
    assert len(result.stderr.splitlines()) == 1
    assert line.startswith(f"error: --resume: {folder}")
    assert re.search(said, line), line
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--force",), "--force: overwrites a run, --resume goes on with it"),
        (("-o", "elsewhere"), "--output-dir: names the folder of a new run"),
        (("--seed", "3"), "in that run"),
    ],
)
def test_resume_beside_what_contradicts_it_is_one_line(cut_off, args, said):
    result = invoke("--resume", str(cut_off), *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_resume_of_no_run_is_one_line_and_leaves_nothing(tmp_path):
    for folder, said in ((tmp_path / "absent", "no such run"), (tmp_path, "holds no run")):
        result = invoke("--resume", str(folder))
        assert (result.exit_code, result.stdout) == (2, "")
        assert said in result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_failed_key_is_tried_again_and_the_rest_is_kept(undisturbed, tmp_path):
    def fail_one(summary):
        summary["status"] = "failed"
        summary["ranks"][0]["graphs"][1]["failure"] = "capture failed: planted"

    folder = rewritten(undisturbed, tmp_path / "run", fail_one)
    result = invoke("--resume", str(folder))
    assert result.exit_code == 0, result.output
    record = read_run(folder)
    assert record.status == "complete"
    assert "profile 1/1 " in result.stderr
    assert "parity 1/1 " in result.stderr
    first = read_run(undisturbed).ranks[0].graphs
    assert [
        new.replay == old.replay for new, old in zip(record.ranks[0].graphs, first, strict=True)
    ] == [True, False, True]
    counts = read_samples(folder).groupby(["key", "phase"], observed=True).size()
    assert (
        counts.xs("round-robin", level="phase") == record.config.measure.round_robin_rounds
    ).all()


def test_graph_of_other_nodes_than_before_keeps_nothing(undisturbed, tmp_path):
    def other_nodes(summary):
        summary["ranks"][0]["graphs"][0]["nodes"]["kernel"] += 1

    folder = rewritten(undisturbed, tmp_path / "run", other_nodes)
    result = invoke("--resume", str(folder))
    assert result.exit_code == 0, result.output
    assert "profile 1/1 " in result.stderr
    assert "parity 1/1 " in result.stderr


def test_check_cannot_be_resumed():
    result = CliRunner().invoke(app, ["check", "--resume", "runs/x"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--resume" in result.stderr


def test_hot_replays_that_were_taken_again_are_kept_and_told(settings, tmp_path, monkeypatch):
    def cut_off(*args):
        raise KeyboardInterrupt

    def again(engine, records, *rest):
        return (records[0].model_copy(update={"hot_repeats": 1}),)

    folder = tmp_path / "run"
    with monkeypatch.context() as planted:
        planted.setattr("cgprof.job.repeat_slow", again)
        planted.setattr("cgprof.job.profile_round_robin", cut_off)
        assert invoke(*settings, *NO_TASK, "-o", str(folder)).exit_code == 130
    assert [one.hot_repeats for one in read_run(folder).ranks[0].graphs] == [1, 0, 0]
    result = invoke("--resume", str(folder))
    assert result.exit_code == 0, result.output
    graphs = read_run(folder).ranks[0].graphs
    assert [one.hot_repeats for one in graphs] == [1, 0, 0]
    assert all(one.round_robin for one in graphs)
    shown = CliRunner().invoke(app, ["report", str(folder), "--table", "stages"]).output
    assert "hot replays of 1 keys were taken again" in shown
