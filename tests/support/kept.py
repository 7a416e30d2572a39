"""A run folder that was kept from a real H200, and runs like it that something was planted in."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from cgprof.record.graph import GraphRecord, MemoryWitness
from cgprof.record.store import read_run
from cgprof.record.types import RankRecord, RunRecord

RUNS = Path(__file__).parents[2] / "notebooks" / "runs"
QUIET = "h200-qwen3-30b-a3b-full-decode-only-dbo"


@cache
def kept_run(name: str = QUIET) -> RunRecord:
    return read_run(RUNS / name)


def with_rank(run: RunRecord, **changes: object) -> RunRecord:
    return run.model_copy(update={"ranks": (run.ranks[0].model_copy(update=changes),)})


def with_graph(run: RunRecord, label: str, **changes: object) -> RunRecord:
    graphs = tuple(
        graph.model_copy(update=changes) if graph.label == label else graph
        for graph in run.ranks[0].graphs
    )
    return with_rank(run, graphs=graphs)


def graph_of(run: RunRecord, label: str) -> GraphRecord:
    return next(graph for graph in run.ranks[0].graphs if graph.label == label)


def with_grown(
    run: RunRecord, label: str, num_bytes: int, *, own: bool, seen: str | None
) -> RunRecord:
    """The device grows by more while one key is captured; `own` says whether NVML tells it so.

    Nothing of it is in a part. `seen` is what NVML's list of processes shows of neighbours.
    """
    graph = graph_of(run, label)
    facts: dict[str, object] = {
        "memory": graph.memory.model_copy(
            update={"rest_bytes": graph.memory.rest_bytes + num_bytes}
        ),
        "witness": _grown(graph.witness, num_bytes, own, seen),
    }
    if seen == "moved":
        facts["warnings"] = (*graph.warnings, "neighbour-moved: device memory is not its alone")
    run = with_graph(run, label, **facts)
    rank: RankRecord = run.ranks[0]
    half = "twin" if graph.key.is_twin else "plain"
    witness = _grown(getattr(rank.totals, f"{half}_witness"), num_bytes, own, seen)
    totals = rank.totals.model_copy(
        update={f"{half}_witness": witness, f"{half}_bytes": witness.device_delta_bytes}
    )
    return with_rank(run, totals=totals)


def _grown(witness: MemoryWitness, num_bytes: int, own: bool, seen: str | None) -> MemoryWitness:
    return witness.model_copy(
        update={
            "device_delta_bytes": witness.device_delta_bytes + num_bytes,
            "nvml_delta_bytes": witness.nvml_delta_bytes + (num_bytes if own else 0),
            "neighbours": seen,
        }
    )
