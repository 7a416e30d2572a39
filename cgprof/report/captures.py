"""Where the time of each capture went, which process found what, and what a cut-off run lacks."""

from __future__ import annotations

from cgprof.record.graph import CaptureTimes, GraphRecord
from cgprof.record.types import RankRecord, RunRecord
from cgprof.report.layout import Cell, Table

_COLUMNS = {
    "key": "key",
    "warm_up_ns": "warm-up",
    "record_ns": "record",
    "instantiate_ns": "instantiate",
    "gc_ns": "garbage collection",
    "readings_ns": "memory readings",
    "total_ns": "in all",
    "capture_process_id": "captured by",
    "timing_process_id": "timed by",
    "round_robin_process_id": "in turn by",
    "parity_process_id": "checked by",
}


def captures_table(rank: RankRecord) -> Table:
    """Returns one row a key: the parts of its capture, and the processes behind its figures."""
    return Table(
        name="captures",
        title="captures",
        columns=_COLUMNS,
        rows=tuple(_row(graph) for graph in rank.graphs),
        notes=(
            "the parts are apart and add up to the whole; a failed capture has them too",
            "by: process ids; a resumed run keeps times and parity, never memory",
        ),
    )


def partial_line(record: RunRecord) -> str:
    """Returns what a run that was cut off has not done; empty for any other, if it has all keys."""
    graphs = {graph.label: graph for rank in record.ranks for graph in rank.graphs}
    absent = [label for label in record.plan.labels if label not in graphs]
    lost = f"{len(absent)} of {len(record.plan.labels)} planned keys not recorded"
    if record.status != "partial":
        return f"run is {record.status}: {lost}" if absent else ""
    steps = {
        "captured": sum(_is_captured(graph) for graph in graphs.values()),
        "timed": sum(graph.replay is not None for graph in graphs.values()),
    }
    if record.config.accuracy.parity:
        steps["checked"] = sum(bool(graph.parity) for graph in graphs.values())
    done = ", ".join(f"{count} {word}" for word, count in steps.items())
    return f"run is partial: {lost}; {done}"


def _is_captured(graph: GraphRecord) -> bool:
    return graph.capture_ns is not None or graph.failure is not None


def _row(graph: GraphRecord) -> tuple[Cell, ...]:
    times = graph.times
    return (
        graph.label,
        *(_parts(times) if times else [None] * 6),
        graph.capture_process_id,
        graph.timing_process_id,
        graph.round_robin_process_id,
        graph.parity_process_id,
    )


def _parts(times: CaptureTimes) -> list[Cell]:
    return [
        times.warm_up_ns,
        times.record_ns,
        times.instantiate_ns,
        times.gc_ns,
        times.readings_ns,
        times.total_ns,
    ]
