"""The stages of a step as a table: how long each took, and the spread of launch."""

from __future__ import annotations

from collections.abc import Iterator

from cgprof.record.graph import GraphRecord, StageStats
from cgprof.record.types import RankRecord
from cgprof.report.layout import Cell, Table

_COLUMNS = {
    "key": "key",
    "phase": "phase",
    "vote_ns": "vote",
    "decide_ns": "decide",
    "prepare_ns": "prepare",
    "launch_ns": "launch",
    "launch_p90_ns": "p90",
    "launch_p95_ns": "p95",
    "launch_p99_ns": "p99",
    "launch_min_ns": "min",
    "noise": "noise",
    "finish_ns": "finish",
    "wait_ns": "wait",
    "step_ns": "step",
    "device_ns": "device",
    "samples": "n",
    "stopped_by": "stopped by",
    "host_pace_ns": "host loop",
    "instrumented": "instrumented",
}
_OPTIONAL = frozenset({"vote_ns", "instrumented", "launch_p90_ns", "launch_p99_ns", "host_pace_ns"})


def stages_table(rank: RankRecord) -> Table:
    """Returns one row a key and phase: the median of each stage, the spread of launch."""
    rows = tuple(row for graph in rank.graphs for row in _stage_rows(graph))
    return Table(
        name="stages",
        title="stages of a step",
        columns=_COLUMNS,
        rows=rows,
        optional=_OPTIONAL,
        notes=(
            "medians; noise: IQR over median of launch, '-' below five samples; n: launch samples",
            *_tail_notes(rank),
            *_pace_notes(rank),
            "stages are apart and overlap device time: never added up",
        ),
    )


def _stage_rows(graph: GraphRecord) -> Iterator[tuple[Cell, ...]]:
    phases = (("eager", graph.eager), ("hot", graph.replay), ("round robin", graph.round_robin))
    for phase, stages in phases:
        if stages is not None:
            pace_ns = graph.host_pace_ns if stages is graph.replay else None
            yield (graph.label, phase, *_stage_cells(stages, pace_ns))


def _stage_cells(stages: StageStats, pace_ns: int | None) -> tuple[Cell, ...]:
    launch = stages.launch
    return (
        stages.vote.median_ns if stages.vote else None,
        stages.decide.median_ns,
        stages.prepare.median_ns,
        launch.median_ns,
        launch.p90_ns,
        launch.p95_ns,
        launch.p99_ns,
        launch.min_ns,
        launch.noise,
        stages.finish.median_ns,
        stages.wait.median_ns,
        stages.step.median_ns if stages.step else None,
        stages.device.median_ns if stages.device else None,
        launch.count,
        launch.stopped_by,
        pace_ns,
        "yes" if stages.instrumented else None,
    )


def _pace_notes(rank: RankRecord) -> list[str]:
    if not any(graph.host_pace_ns for graph in rank.graphs):
        return []
    repeated = sum(graph.hot_repeats > 0 for graph in rank.graphs)
    again = (
        f"hot replays of {repeated} keys were taken again, since the host was slow beside them; "
        "eager ones were not"
    )
    return [
        "host loop: a fixed loop of Python beside the hot replays; longer is a slower host",
        *([again] if repeated else []),
    ]


def _tail_notes(rank: RankRecord) -> list[str]:
    series = (one for graph in rank.graphs for one in (graph.eager, graph.replay))
    if any(stages is not None and stages.launch.p90_ns is not None for stages in series):
        return ["p90, p95, p99: of launch; no p99 below a hundred samples"]
    return []
