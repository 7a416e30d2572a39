import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cgprof.errors import ConfigError, RecordError
from cgprof.record.graph import LaunchStats
from cgprof.record.lock import LOCK
from cgprof.record.samples import SAMPLE_SCHEMA, SampleSink
from cgprof.record.store import RunWriter, read_items, read_run, read_samples
from tests.support.kept import kept_run, write_as_version_2
from tests.support.records import graph_record, launch_stats, run_record


def _columns(count, device=False):
    stages = ("decide_ns", "prepare_ns", "launch_ns", "finish_ns", "wait_ns")
    columns = {name: np.arange(count, dtype=np.int64) + 10 * i for i, name in enumerate(stages)}
    columns["device_ns"] = np.full(count, 77, np.int64) if device else None
    return columns


def _refuse_constant(name):
    raise AssertionError(f"{name} in JSON")


def test_store_gives_a_run_back_as_it_was(tmp_path):
    writer = RunWriter(tmp_path / "run")
    record = run_record([graph_record(8), graph_record(4, failure="planted")])
    writer.write(record)
    assert read_run(tmp_path / "run") == record


def test_store_gives_samples_back_in_order_with_missing_device_times_null(tmp_path):
    writer = RunWriter(tmp_path)
    writer.samples.append("FULL-8", "eager", _columns(3))
    writer.samples.append("FULL-8", "hot", _columns(2, device=True))
    writer.write(run_record())
    frame = read_samples(tmp_path)
    assert frame["key"].tolist() == ["FULL-8"] * 5
    assert frame["phase"].tolist() == ["eager"] * 3 + ["hot"] * 2
    assert frame["launch_ns"].tolist() == [20, 21, 22, 20, 21]
    assert frame["device_ns"].isna().tolist() == [True] * 3 + [False] * 2


def test_store_without_samples_has_an_empty_table(tmp_path):
    RunWriter(tmp_path).write(run_record())
    frame = read_samples(tmp_path)
    assert len(frame) == 0
    assert list(frame.columns)[:3] == ["key", "phase", "decide_ns"]


def test_store_rewrites_the_run_as_it_grows_and_leaves_no_part(tmp_path):
    writer = RunWriter(tmp_path)
    for count in (1, 2, 3):
        writer.samples.append(f"k{count}", "hot", _columns(count))
        writer.write(run_record([graph_record(n) for n in range(1, count + 1)]))
        assert len(read_run(tmp_path).ranks[0].graphs) == count
    writer.write(run_record(status="complete"))
    writer.close()
    assert len(read_samples(tmp_path)) == 6
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["status"] == "complete"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [*manifest["files"], "manifest.json"]
    )


_ROOT = Path(__file__).parents[2]
_DYING_WRITER = """
import os, signal, sys
from pathlib import Path
from cgprof.record.store import RunWriter
from tests.support.kept import kept_run, write_as_version_2
from tests.support.records import graph_record, run_record
path, fatal = Path(sys.argv[1]), int(sys.argv[2])
calls = 0
replace = os.replace
def dying(source, target):
    global calls
    calls += 1
    if calls == fatal:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
os.replace = dying
writer = RunWriter(path)
for count in (1, 2):
    writer.write(run_record([graph_record(n) for n in range(1, count + 1)]))
"""


@pytest.mark.parametrize(("fatal", "whole"), [(4, 1), (5, 1), (6, 2)])
def test_store_is_readable_after_a_kill_at_any_rename(tmp_path, fatal, whole):
    command = [sys.executable, "-c", _DYING_WRITER, str(tmp_path / "run"), str(fatal)]
    died = subprocess.run(command, check=False, env={**os.environ, "PYTHONPATH": str(_ROOT)})
    assert died.returncode == -9
    assert any(p.name.endswith(".part") for p in (tmp_path / "run").iterdir())
    assert len(read_run(tmp_path / "run").ranks[0].graphs) == whole
    assert len(read_samples(tmp_path / "run")) == 0


def test_store_writes_json_without_nan_or_infinity(tmp_path):
    stats = launch_stats(count=1, noise=None)
    record = run_record([graph_record(8, eager=None, replay=None, failure="planted")])
    RunWriter(tmp_path).write(record)
    json.loads((tmp_path / "summary.json").read_text(), parse_constant=_refuse_constant)
    assert json.loads(stats.model_dump_json())["noise"] is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_records_and_store_refuse_nan_and_infinity(tmp_path, value):
    with pytest.raises(ValueError, match="finite"):
        LaunchStats(**{**launch_stats().model_dump(), "noise": value})
    writer = RunWriter(tmp_path)
    writer.write(run_record())
    smuggled = run_record().model_copy(update={"process_seconds": {"warm-up": value}})
    with pytest.raises(RecordError, match="not written"):
        writer.write(smuggled)
    assert read_run(tmp_path) == run_record()


def test_writer_refuses_an_occupied_folder(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"not empty.*--force"):
        RunWriter(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_writer_with_force_replaces_only_files_of_a_run(tmp_path):
    first = RunWriter(tmp_path)
    first.samples.append("old", "hot", _columns(2))
    first.write(run_record(run_id="old"))
    first.close()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "summary.json.part").write_text("{")
    second = RunWriter(tmp_path, force=True)
    assert read_run(tmp_path).run_id == "old"
    second.write(run_record(run_id="new"))
    assert read_run(tmp_path).run_id == "new"
    assert len(read_samples(tmp_path)) == 0
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not list(tmp_path.glob("*.part"))


def test_writer_refuses_a_path_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="output-dir"):
        RunWriter(tmp_path / "file")


def _damage(path, change):
    summary = json.loads((path / "summary.json").read_text())
    change(summary)
    (path / "summary.json").write_text(json.dumps(summary))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.update(schema_version=99), "schema version 99, this cgprof reads 2, 3"),
        (lambda s: s.update(schema_version=2.0), "schema version 2.0"),
        (lambda s: s.update(schema_version=1), "schema version 1,"),
        (lambda s: s.pop("schema_version"), "schema version None"),
        (lambda s: s.update(status="odd"), "damaged: status"),
        (lambda s: s.update(extra=1), "damaged: extra"),
        (lambda s: s["process_seconds"].update(x=float("nan")), "damaged: process_seconds.x"),
    ],
)
def test_read_run_names_what_is_wrong_in_one_line(tmp_path, change, said):
    RunWriter(tmp_path).write(run_record())
    _damage(tmp_path, change)
    with pytest.raises(RecordError) as caught:
        read_run(tmp_path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_folder_with_a_setting_that_was_dropped_is_read_and_one_that_never_was_is_not(tmp_path):
    write_as_version_2(tmp_path)
    _damage(tmp_path, lambda summary: summary["config"]["measure"].update(pin_host=True))
    found = read_run(tmp_path)
    before = kept_run().config.measure.model_copy(update={"slow_host_repeats": 0})
    assert found.config.measure == before
    assert found.dropped_settings == {"measure.pin_host": "True"}
    _damage(tmp_path, lambda summary: summary["config"]["measure"].update(pin_ghost=True))
    with pytest.raises(RecordError, match="pin_ghost"):
        read_run(tmp_path)


def test_folder_of_schema_version_2_is_read_with_what_it_holds(tmp_path):
    write_as_version_2(tmp_path)
    older, today = read_run(tmp_path), kept_run()
    assert (older.schema_version, today.schema_version) == (2, 6)
    rank, now = older.ranks[0], today.ranks[0]
    assert now.contents
    assert now.replay_costs
    assert now.launch_model is not None
    assert (rank.contents, rank.replay_costs, rank.launch_model) == ({}, {}, None)
    for graph, same in zip(rank.graphs, now.graphs, strict=True):
        assert graph.replay.launch.p99_ns is None
        assert graph.replay.launch.median_ns == same.replay.launch.median_ns
        assert (graph.key, graph.nodes, graph.memory) == (same.key, same.nodes, same.memory)
    assert (older.config.parallel.data_parallel_size, older.environment.code) == (1, None)
    assert older.config.capture.finish_graphs is False
    assert older.config.measure.slow_host_repeats == 0


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff", "[" * 100_000, "1" * 5000])
def test_read_run_refuses_what_is_not_a_run(tmp_path, text):
    (tmp_path / "summary.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(RecordError):
        read_run(tmp_path)


def test_read_tells_a_missing_folder_from_an_empty_one(tmp_path):
    with pytest.raises(RecordError, match="no such run folder"):
        read_run(tmp_path / "absent")
    with pytest.raises(RecordError, match="holds no run"):
        read_run(tmp_path)
    with pytest.raises(RecordError, match=r"replays\.parquet is missing"):
        read_samples(tmp_path)


def test_read_samples_refuses_a_damaged_table(tmp_path):
    (tmp_path / "replays.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(RecordError, match="is damaged"):
        read_samples(tmp_path)


@pytest.mark.parametrize(
    "table",
    [
        pa.table({"key": ["a"]}),
        SAMPLE_SCHEMA.empty_table().set_column(2, "decide_ns", pa.array([], pa.string())),
    ],
)
def test_read_samples_refuses_other_columns(tmp_path, table):
    pq.write_table(table, tmp_path / "replays.parquet")
    with pytest.raises(RecordError, match="column"):
        read_samples(tmp_path)


def test_read_samples_and_items_refuse_a_directory(tmp_path):
    (tmp_path / "replays.parquet").mkdir()
    (tmp_path / "items.parquet").mkdir()
    for read in (read_samples, read_items):
        with pytest.raises(RecordError, match="no file"):
            read(tmp_path)


def test_writer_leaves_no_folder_before_its_first_write(tmp_path):
    writer = RunWriter(tmp_path / "runs" / "run")
    assert not (tmp_path / "runs").exists()
    writer.write(run_record())
    assert read_run(tmp_path / "runs" / "run") == run_record()


@pytest.mark.parametrize("force", [False, True])
def test_second_writer_of_one_folder_is_refused_while_the_first_is_at_it(tmp_path, force):
    first, second, third = (RunWriter(tmp_path / "run", force=force) for _ in range(3))
    first.claim()
    with pytest.raises(ConfigError, match=f"being written by process {os.getpid()} on "):
        second.claim()
    first.write(run_record())
    with pytest.raises(ConfigError, match="being written by process"):
        third.write(run_record(run_id="other"))
    assert read_run(tmp_path / "run") == run_record()
    first.close()
    assert not (tmp_path / "run" / LOCK).exists()
    if force:
        third.write(run_record(run_id="other"))
        assert read_run(tmp_path / "run").run_id == "other"
    else:
        with pytest.raises(ConfigError, match="not empty"):
            third.write(run_record(run_id="other"))


_HOLDER = """
import sys
from pathlib import Path
from cgprof.record.store import RunWriter
writer = RunWriter(Path(sys.argv[1]), force=True)
writer.claim()
print("claimed", flush=True)
sys.stdin.read()
"""


def test_lock_of_another_process_holds_until_that_is_killed(tmp_path):
    command = [sys.executable, "-c", _HOLDER, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(_ROOT)}, **pipes) as other:
        assert other.stdout.readline() == "claimed\n"
        with pytest.raises(ConfigError, match=f"being written by process {other.pid} on "):
            RunWriter(tmp_path, force=True).claim()
        other.kill()
        other.wait()
        assert (tmp_path / LOCK).exists()
        RunWriter(tmp_path).write(run_record())
    assert read_run(tmp_path) == run_record()


def test_folder_that_is_forced_says_what_the_new_run_says_after_a_kill_at_any_rename(tmp_path):
    for fatal in range(1, 5):
        with RunWriter(tmp_path, force=True) as old:
            old.samples.append("FULL-8x8q1", "hot", _columns(2))
            old.write(run_record([graph_record(8)], status="complete", run_id="old"))
        code = _DYING_WRITER.replace("RunWriter(path)", "RunWriter(path, force=True)")
        code = code.replace("[graph_record(n) for n in range(1, count + 1)]", "")
        command = [sys.executable, "-c", code, str(tmp_path), str(fatal)]
        died = subprocess.run(command, check=False, env={**os.environ, "PYTHONPATH": str(_ROOT)})
        assert died.returncode == -9
        record = read_run(tmp_path)
        assert record.status == ("complete" if fatal == 1 else "partial")
        assert read_samples(tmp_path)["key"].isin(record.plan.labels).all()


def test_samples_say_which_process_took_them_and_older_ones_do_not(tmp_path):
    with RunWriter(tmp_path) as writer:
        writer.samples.append("FULL-8", "hot", _columns(2))
        writer.write(run_record())
    assert read_samples(tmp_path)["process_id"].tolist() == [os.getpid()] * 2
    older = pq.read_table(tmp_path / "replays.parquet").drop_columns(["process_id"])
    pq.write_table(older, tmp_path / "replays.parquet")
    assert read_samples(tmp_path)["process_id"].isna().all()


def test_samples_of_a_table_are_taken_over_series_by_series(tmp_path):
    sink, taken = SampleSink(), SampleSink()
    for key in ("a", "b"):
        for phase in ("eager", "round-robin"):
            sink.append(key, phase, _columns(3))
    taken.take(sink.table())
    assert taken.table().to_pylist() == sink.table().to_pylist()
    taken.keep(lambda key, phase: key == "b" and phase == "eager")
    assert {(row["key"], row["phase"]) for row in taken.table().to_pylist()} == {("b", "eager")}


def test_numbered_writers_never_share_a_folder(tmp_path):
    writers = [RunWriter(tmp_path / "runs" / "r", numbered=True) for _ in range(3)]
    assert [writer.claim() for writer in writers] == ["", "_2", "_3"]
    assert [writer.path.name for writer in writers] == ["r", "r_2", "r_3"]


@pytest.mark.parametrize("name", ["items.parquet", "nodes.parquet", "nodes.parquet.part"])
def test_what_lies_in_the_place_of_a_file_and_cannot_be_removed_is_told(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(RecordError, match=f"{name}: cannot be removed"):
        RunWriter(tmp_path, force=True).write(run_record())
