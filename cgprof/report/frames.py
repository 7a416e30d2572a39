"""Run folders as DataFrames, for notebooks and figures. Units are in the names of the columns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pandas as pd

from cgprof.record.cost import LaunchPoint
from cgprof.record.graph import GraphRecord, LaunchStats, StageStats
from cgprof.record.store import read_run, read_samples
from cgprof.record.timeline import read_timelines
from cgprof.record.types import RankRecord, RunRecord
from cgprof.report.headline import graph_memory, key_memory_bytes
from cgprof.report.launches import launches_table
from cgprof.report.layout import Cell, ratio
from cgprof.report.memory_sum import memory_sum_table
from cgprof.report.parity import LEGS, key_verdict, leg_verdict
from cgprof.report.ranks import rank_tables
from cgprof.report.worth import worth_table
from cgprof.shapes import GraphKey, RuntimeMode

_INTEGERS = ("_ns", "_bytes", "_process_id", "num_reqs", "uniform_query_len", "nodes", "_tokens")
_FLOATS = ("_ratio", "_share", "experts_hit", "hidden", "_low", "_high")
_NO_POINT = LaunchPoint(kind="kernel", counts={}, median_ns=0, iqr_ns=0, count=0)
_NO_GRAPH = GraphRecord(key=GraphKey(mode=RuntimeMode.NONE, num_tokens=0), label="")


def graphs_frame(record: RunRecord) -> pd.DataFrame:
    """Returns one row a key and rank, in capture order; what was not measured is NA."""
    rows = [
        {"rank": rank.rank, **_graph_row(record, graph)}
        for rank in record.ranks
        for graph in rank.graphs
    ]
    columns = ["rank", *_graph_row(record, _NO_GRAPH)]
    return _typed(pd.DataFrame(rows, columns=columns))


def worth_frame(record: RunRecord) -> pd.DataFrame:
    """Returns one row a token count at which steps were compared plain and split, else none."""
    table = worth_table(record)
    frame = pd.DataFrame(table.records(), columns=table.record_names())
    frame.insert(0, "recorder", record.recorder)
    return _typed(frame)


def launches_frame(record: RunRecord) -> pd.DataFrame:
    """Returns one row a key and rank whose replay call was timed by itself."""
    tables = [
        replace(launches_table(rank, record.recorder), tags={"rank": rank.rank})
        for rank in record.ranks or (RankRecord(),)
    ]
    rows = [row for table in tables for row in table.records()]
    frame = pd.DataFrame(rows, columns=tables[0].record_names())
    frame.insert(0, "recorder", record.recorder)
    return _typed(frame)


def launch_points_frame(record: RunRecord) -> pd.DataFrame:
    """Returns one row a synthetic graph and rank that the launch model was fitted to."""
    rows = [
        {"rank": rank.rank, "recorder": record.recorder, **_point_row(point)}
        for rank in record.ranks
        if rank.launch_model is not None
        for point in rank.launch_model.points
    ]
    columns = ["rank", "recorder", *_point_row(_NO_POINT)]
    return _typed(pd.DataFrame(rows, columns=columns))


def memory_sums_frame(record: RunRecord) -> pd.DataFrame:
    """Returns one row each for plain keys, twins and all of a rank, once totals are known."""
    tables = [
        replace(memory_sum_table(rank), tags={"rank": rank.rank})
        for rank in record.ranks or (RankRecord(),)
    ]
    rows = [row for table in tables for row in table.records()]
    return _typed(pd.DataFrame(rows, columns=tables[0].record_names()))


def ranks_frame(record: RunRecord) -> pd.DataFrame:
    """Returns one row a key and stage: least, median and most over the ranks of hot replays."""
    table = rank_tables(record)[0]
    return _typed(pd.DataFrame(table.records(), columns=table.record_names()))


def samples_frame(path: str | Path) -> pd.DataFrame:
    """Returns one row a timed step or replay call of a run folder, as the store keeps them.

    Raises:
        RecordError: the folder is unreadable.
    """
    return read_samples(Path(path))


def timelines_frame(path: str | Path) -> pd.DataFrame:
    """Returns one row an activity of the replays that a run folder traced, else no rows.

    Raises:
        RecordError: the file is damaged.
    """
    frame: pd.DataFrame = read_timelines(Path(path)).to_pandas()
    return frame.astype(dict.fromkeys(("key", "name", "kind", "role"), "str"))


def runs_frame(paths: Iterable[str | Path]) -> pd.DataFrame:
    """Returns one row a run folder.

    Raises:
        RecordError: a folder is unreadable.
    """
    return _typed(pd.DataFrame([_run_row(Path(path)) for path in paths]))


def _graph_row(record: RunRecord, graph: GraphRecord) -> dict[str, Cell]:
    key = graph.key
    return {
        "label": graph.label,
        "kind": "twin" if key.is_twin else "plain",
        "recorder": record.recorder,
        "mode": key.mode.name,
        "num_tokens": key.num_tokens,
        "num_reqs": key.num_reqs,
        "uniform_query_len": key.uniform_query_len,
        "num_microbatches": key.num_microbatches,
        "kernel_nodes": graph.nodes.get("kernel"),
        "nodes": sum(graph.nodes.values()) if graph.nodes else None,
        **_times(graph),
        **_memory(record, graph),
        "experts_hit": graph.experts_hit,
        "exchange_moved_bytes": graph.exchange_moved_bytes,
        "exchange_needed_bytes": graph.exchange_needed_bytes,
        "parity": None if graph.failure else key_verdict(graph),
        **{f"parity_{leg.replace('-', '_')}": _leg_word(graph, leg) for leg in LEGS},
        "replays": graph.replays,
        "capture_process_id": graph.capture_process_id,
        "timing_process_id": graph.timing_process_id,
        "round_robin_process_id": graph.round_robin_process_id,
        "parity_process_id": graph.parity_process_id,
        "warnings": "; ".join(graph.warnings) or None,
        "failure": graph.failure,
    }


def _point_row(point: LaunchPoint) -> dict[str, Cell]:
    """The quartiles are low and high; around the median of an older run they are an estimate."""
    half_ns = point.iqr_ns // 2
    low_ns, high_ns = max(0, point.median_ns - half_ns), point.median_ns + half_ns
    if point.p25_ns is not None:
        low_ns, high_ns = point.p25_ns, point.p25_ns + point.iqr_ns
    return {
        "series": point.kind,
        "kernels": point.counts.get("kernel", 0),
        "event_records": point.counts.get("event-record", 0),
        "forks": point.counts.get("fork", 0),
        "nodes": point.nodes,
        "waited_ns": point.waited_ns,
        "launch_ns": point.quiet_ns,
        "launch_iqr_ns": point.iqr_ns,
        "launch_low_ns": low_ns,
        "launch_high_ns": high_ns,
        "samples": point.count,
    }


def _times(graph: GraphRecord) -> dict[str, Cell]:
    eager, hot = _medians(graph.eager), _medians(graph.replay)
    return {
        "eager_launch_ns": eager["launch"],
        "replay_launch_ns": hot["launch"],
        "replay_launch_p90_ns": graph.replay.launch.p90_ns if graph.replay else None,
        "replay_launch_p99_ns": graph.replay.launch.p99_ns if graph.replay else None,
        "launch_ratio": ratio(eager["launch"], hot["launch"]),
        "round_robin_launch_ns": _medians(graph.round_robin)["launch"],
        "first_replay_ns": graph.first_replay_ns,
        "vote_ns": hot["vote"],
        "decide_ns": hot["decide"],
        "prepare_ns": hot["prepare"],
        "finish_ns": hot["finish"],
        "wait_ns": hot["wait"],
        "step_ns": hot["step"],
        "eager_step_ns": eager["step"],
        "device_ns": hot["device"],
        "eager_device_ns": eager["device"],
        "capture_ns": graph.capture_ns,
        "instantiate_ns": graph.instantiate_ns,
    }


def _memory(record: RunRecord, graph: GraphRecord) -> dict[str, Cell]:
    parts, witness = graph.memory, graph.witness
    return {
        "memory_bytes": key_memory_bytes(record, graph),
        "pool_bytes": parts.pool_bytes if parts else None,
        "instantiate_bytes": parts.instantiate_bytes if parts else None,
        "outputs_bytes": parts.outputs_bytes if parts else None,
        "workspaces_bytes": sum(parts.workspaces.values()) if parts else None,
        "rest_bytes": parts.rest_bytes if parts else None,
        "allocator_bytes": witness.allocator_bytes if witness else None,
        "device_delta_bytes": witness.device_delta_bytes if witness else None,
        "nvml_delta_bytes": witness.nvml_delta_bytes if witness else None,
    }


def _medians(stages: StageStats | None) -> dict[str, int | None]:
    names = ("vote", "decide", "prepare", "launch", "finish", "wait", "device", "step")
    found: dict[str, int | None] = {}
    for name in names:
        stats: LaunchStats | None = getattr(stages, name, None)
        found[name] = stats.median_ns if stats else None
    return found


def _leg_word(graph: GraphRecord, leg: str) -> str | None:
    return next((leg_verdict(result) for result in graph.parity if result.leg == leg), None)


def _run_row(path: Path) -> dict[str, Cell]:
    record = read_run(path)
    graphs = [graph for rank in record.ranks for graph in rank.graphs]
    captured = [graph for graph in graphs if graph.failure is None]
    memory = graph_memory(record.ranks[0]) if record.ranks else None
    device = record.environment.device
    return {
        "run": path.name,
        "run_id": record.run_id,
        "status": record.status,
        "recorder": record.recorder,
        "started_at": record.started_at,
        "model": record.model.name,
        "requested_policy": record.plan.requested_policy.value,
        "policy": record.plan.policy.value,
        "microbatches": record.config.microbatch.num_microbatches
        if record.config.microbatch.enabled
        else 1,
        "device": device.name if device else record.environment.cpu,
        "torch": record.environment.torch,
        "cuda": record.environment.cuda,
        "planned": len(record.plan.labels),
        "plain": sum(not graph.key.is_twin for graph in captured),
        "twins": sum(graph.key.is_twin for graph in captured),
        "failed": len(graphs) - len(captured),
        "memory_source": memory.source if memory else None,
        "plain_bytes": memory.plain_bytes if memory else None,
        "total_bytes": memory.whole_bytes if memory else None,
        "twins_ratio": memory.twins_ratio if memory else None,
    }


def _typed(frame: pd.DataFrame) -> pd.DataFrame:
    types = {name: "Int64" for name in frame.columns if name.endswith(_INTEGERS)}
    types |= {name: "float64" for name in frame.columns if name.endswith(_FLOATS)}
    return frame.astype(types)
