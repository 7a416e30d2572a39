import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cgprof.errors import RecordError
from cgprof.record.nodes import NODES, NodeTable
from cgprof.record.overlap import TracedReplay
from cgprof.record.store import RunWriter, read_run
from cgprof.record.timeline import (
    TIMELINE_SCHEMA,
    TIMELINES,
    TimelineTable,
    read_timeline,
    read_timelines,
)
from cgprof.record.types import RankRecord
from tests.support.records import run_record
from tests.support.timelines import PLANTED

TWIN = tuple(one._replace(duration_ns=5, stream=2**31) for one in PLANTED)


def written(path, replays, **changes):
    writer = RunWriter(path)
    writer.timelines = TimelineTable(replays)
    writer.write(run_record(**changes))
    writer.close()
    return path


def files(path):
    return json.loads((path / "manifest.json").read_text())["files"]


def test_activities_come_back_by_key_as_they_were(tmp_path):
    path = written(tmp_path, {"FULL-8": PLANTED, "FULL-8-mb2": TWIN, "FULL-4": ()})
    assert tuple(read_timeline(path, "FULL-8")) == PLANTED
    assert tuple(read_timeline(path, "FULL-8-mb2")) == TWIN
    assert TIMELINES in files(path)
    assert read_timelines(path).num_rows == len(PLANTED) + len(TWIN)
    with pytest.raises(RecordError, match="no traced replay of FULL-4"):
        read_timeline(path, "FULL-4")


def test_timelines_and_nodes_are_written_once_each_and_apart(tmp_path):
    writer = RunWriter(tmp_path)
    writer.timelines = TimelineTable({"k": PLANTED})
    writer.write(run_record())
    before = (tmp_path / TIMELINES).stat()
    writer.nodes = NodeTable({"k": [("kernel", "a", ())]})
    writer.write(run_record(status="complete"))
    after = (tmp_path / TIMELINES).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert {NODES, TIMELINES} <= set(files(tmp_path))
    writer.timelines = TimelineTable({"k": TWIN})
    writer.write(run_record(status="complete"))
    assert tuple(read_timeline(tmp_path, "k")) == TWIN
    assert not list(tmp_path.glob("*.part"))


def test_folder_without_timelines_has_no_rows_and_older_ones_do_not_outlive_a_rerun(tmp_path):
    written(tmp_path, {"k": PLANTED})
    RunWriter(tmp_path, force=True).write(run_record())
    assert not list(tmp_path.glob(TIMELINES + "*"))
    assert TIMELINES not in files(tmp_path)
    assert read_timelines(tmp_path).equals(TIMELINE_SCHEMA.empty_table())
    with pytest.raises(RecordError, match="no traced replay of k"):
        read_timeline(tmp_path, "k")


def test_sums_are_in_the_summary_and_may_be_missing_there(tmp_path):
    times = dict.fromkeys(("span_ns", "compute_ns", "both_ns", "neither_ns"), 8)
    replay = TracedReplay(activities=3, transfers=1, streams=2, communication_ns=32, **times)
    assert replay.hidden == 0.25
    ranks = (RankRecord(timelines={"k": replay}), RankRecord(rank=1))
    path = written(tmp_path, {"k": PLANTED}, ranks=ranks)
    assert read_run(path).ranks[0].timelines == {"k": replay}
    summary = json.loads((path / "summary.json").read_text())
    del summary["ranks"][0]["timelines"]
    (path / "summary.json").write_text(json.dumps(summary))
    assert read_run(path).ranks[0].timelines == {}


def test_eight_replays_of_large_graphs_are_small(tmp_path):
    many = [
        PLANTED[index % 7]._replace(start_ns=6_000 * index + index * 37 % 401, duration_ns=index)
        for index in range(1800)
    ]
    path = written(tmp_path, {f"FULL-{key}": many for key in range(8)})
    assert (path / TIMELINES).stat().st_size < 100_000


def table(**changes):
    columns = {
        **{name: pa.array(["compute"]).dictionary_encode() for name in ("key", "name", "kind")},
        "role": pa.array(["compute"]).dictionary_encode(),
        **{name: pa.array([7], pa.int64()) for name in ("stream", "start_ns", "duration_ns")},
        **changes,
    }
    return pa.table({name: column for name, column in columns.items() if column is not None})


@pytest.mark.parametrize(
    "damage",
    [
        {"name": None},
        {"stream": pa.array([7], pa.int32())},
        {"start_ns": pa.array([-1], pa.int64())},
        {"duration_ns": pa.array([None], pa.int64())},
        {"role": pa.array(["idle"]).dictionary_encode()},
    ],
)
def test_damaged_timelines_are_refused(tmp_path, damage):
    pq.write_table(table(), tmp_path / TIMELINES)
    assert read_timelines(tmp_path).equals(table())
    pq.write_table(table(**damage), tmp_path / TIMELINES)
    with pytest.raises(RecordError, match="damaged"):
        read_timelines(tmp_path)


def test_what_is_no_table_is_refused(tmp_path):
    (tmp_path / TIMELINES).write_bytes(b"PAR1 and nothing more")
    with pytest.raises(RecordError, match=TIMELINES):
        read_timelines(tmp_path)
    (tmp_path / TIMELINES).unlink()
    (tmp_path / TIMELINES).mkdir()
    with pytest.raises(RecordError, match="it is no file"):
        read_timelines(tmp_path)
