import numpy as np
import pyarrow.parquet as pq

from cgprof.record.samples import SampleSink
from cgprof.record.store import RunWriter, read_sample_table, read_samples
from tests.support.records import run_record


def columns(*values):
    return {"launch_ns": np.array(values, np.int64), "launch_cpu_ns": np.array(values, np.int64)}


def test_cpu_times_of_replay_calls_come_back_and_older_runs_have_none(tmp_path):
    writer = RunWriter(tmp_path)
    writer.samples.append("a", "idle", columns(5, 6))
    writer.samples.append("a", "busy", columns(7))
    writer.samples.append("a", "hot", {"launch_ns": np.array([9], np.int64)})
    writer.write(run_record())
    writer.close()
    frame = read_samples(tmp_path)
    assert frame["phase"].tolist() == ["idle", "idle", "busy", "hot"]
    assert frame["launch_cpu_ns"].dropna().tolist() == [5, 6, 7]
    older = pq.read_table(tmp_path / "replays.parquet").drop_columns(["launch_cpu_ns"])
    pq.write_table(older, tmp_path / "replays.parquet")
    assert read_samples(tmp_path)["launch_cpu_ns"].isna().all()
    sink = SampleSink()
    sink.take(read_sample_table(tmp_path))
    sink.append("b", "idle", columns(1))
    assert sink.table().num_rows == 5
