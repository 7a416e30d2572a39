import pandas as pd
import pytest

from cgprof.errors import RecordError
from cgprof.record.cost import ReplayCost
from cgprof.report.frames import (
    graphs_frame,
    launch_points_frame,
    launches_frame,
    memory_sums_frame,
    runs_frame,
    samples_frame,
)
from tests.support.kept import kept_run
from tests.support.records import launch_stats
from tests.support.runs import (
    KIB,
    MIB,
    cuda_dbo_run,
    cuda_run,
    run_record,
    tape_dbo_run,
    write_run,
)


def test_graphs_frame_has_one_row_a_key_in_capture_order():
    frame = graphs_frame(cuda_dbo_run())
    assert list(frame["label"]) == [
        "FULL-64x64q1",
        "FULL-8x8q1",
        "FULL-64x64q1-mb2",
        "FULL-32x32q1-mb2",
    ]
    assert list(frame["kind"]) == ["plain", "plain", "twin", "twin"]
    assert list(frame["num_microbatches"]) == [1, 1, 2, 2]


def test_graphs_frame_keeps_each_figure_under_its_unit():
    row = graphs_frame(cuda_dbo_run()).iloc[2]
    expected = {
        "eager_launch_ns": 40_000_000,
        "replay_launch_ns": 36_000,
        "round_robin_launch_ns": 72_000,
        "device_ns": 4_000_000,
        "eager_device_ns": 5_000_000,
        "first_replay_ns": 300_000,
        "prepare_ns": 150_000,
        "pool_bytes": MIB + 512 * KIB,
        "workspaces_bytes": 64 * KIB,
        "memory_bytes": 9 * MIB,
        "nodes": 1202,
        "kernel_nodes": 1200,
        "parity": "pass",
        "parity_step_reference": "pass",
    }
    assert {name: row[name] for name in expected} == expected
    assert row["launch_ratio"] == pytest.approx(40_000 / 36)


def test_graphs_frame_of_a_failed_key_is_na_and_keeps_the_reason():
    row = graphs_frame(cuda_dbo_run()).iloc[3]
    assert row["failure"].startswith("out of memory")
    missing = ["replay_launch_ns", "memory_bytes", "nodes", "launch_ratio", "parity"]
    assert all(pd.isna(row[name]) for name in missing)


def test_graphs_frame_without_keys_has_the_same_columns():
    empty = graphs_frame(run_record("cuda", ()))
    assert empty.empty
    assert list(empty.columns) == list(graphs_frame(cuda_run()).columns)


def test_graphs_frame_of_a_tape_has_arena_memory_and_no_device_times():
    frame = graphs_frame(tape_dbo_run())
    assert set(frame["recorder"]) == {"tape"}
    assert list(frame["memory_bytes"]) == [96 * KIB, 96 * KIB]
    assert frame["device_ns"].isna().all()


def test_samples_frame_reads_a_run_folder(tmp_path):
    frame = samples_frame(write_run(tmp_path / "run", tape_dbo_run()))
    assert list(frame.columns[:3]) == ["key", "phase", "decide_ns"]
    assert len(frame) == 2 * 3 * 20
    assert frame["device_ns"].isna().all()


def test_runs_frame_has_one_row_a_folder(tmp_path):
    folders = [
        write_run(tmp_path / "plain", cuda_run()),
        write_run(tmp_path / "dbo", cuda_dbo_run()),
    ]
    frame = runs_frame(folders)
    assert list(frame["run"]) == ["plain", "dbo"]
    assert list(frame["twins"]) == [0, 1]
    assert list(frame["failed"]) == [0, 1]
    assert list(frame["microbatches"]) == [1, 2]
    assert list(frame["total_bytes"]) == [320 * MIB, 650 * MIB]
    assert pd.isna(frame["twins_ratio"][0])
    assert frame["twins_ratio"][1] == pytest.approx(650 / 320)


def test_runs_frame_refuses_a_folder_without_a_run(tmp_path):
    with pytest.raises(RecordError):
        runs_frame([tmp_path / "absent"])


def test_launches_frame_has_one_row_a_timed_key_and_null_where_nothing_is_known():
    run = cuda_dbo_run()
    label = run.ranks[0].graphs[0].label
    cost = ReplayCost(idle=launch_stats(9_000, p90_ns=9_900), idle_cpu=launch_stats(8_000))
    rank = run.ranks[0].model_copy(update={"replay_costs": {label: cost}})
    frame = launches_frame(run.model_copy(update={"ranks": (rank,)}))
    assert list(frame["key"]) == [label]
    row = frame.iloc[0]
    assert (row["recorder"], row["rank"], row["idle_ns"], row["idle_p90_ns"]) == (
        *("cuda", 0, 9_000, 9_900),
    )
    assert pd.isna(row["busy_ns"])
    assert frame["busy_ns"].dtype == "Int64"
    assert list(launches_frame(run).columns) == list(frame.columns)
    assert launches_frame(run).empty


def test_launch_points_frame_has_one_row_a_synthetic_graph():
    record = kept_run()
    frame = launch_points_frame(record)
    points = record.ranks[0].launch_model.points
    assert frame["launch_ns"].tolist() == [point.quiet_ns for point in points]
    assert frame["series"].tolist() == [point.kind for point in points]
    events = frame[frame["event_records"] > 0]
    assert events["event_records"].tolist() == [1, 10, 50, 100, 200, 400]
    assert (events["nodes"] == events["event_records"] + events["kernels"]).all()
    none = launch_points_frame(cuda_dbo_run())
    assert none.empty
    assert list(none.columns) == list(frame.columns)


def test_memory_sums_frame_has_sizes_as_integers_and_na_where_there_is_no_device():
    frame = memory_sums_frame(kept_run())
    assert frame["what"].tolist() == ["plain keys", "twins", "all"]
    assert frame["device_delta_bytes"].tolist() == [112 * 2**20, 162 * 2**20, 274 * 2**20]
    assert str(frame["released_bytes"].dtype) == "Int64"
    assert memory_sums_frame(tape_dbo_run())["device_delta_bytes"].isna().all()
