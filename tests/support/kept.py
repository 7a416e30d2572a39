"""The run folders kept from a real H200, one made older, and runs with something planted."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from cgprof.record.graph import GraphRecord, MemoryWitness
from cgprof.record.store import read_run
from cgprof.record.types import RankRecord, RunRecord

RUNS = Path(__file__).parents[2] / "notebooks" / "runs"
KEPT = sorted(path.name for path in RUNS.iterdir())
QUIET = "h200-qwen3-30b-a3b-full-decode-only-dbo"
# What came after the first folders of schema version 2, by name wherever it stands.
_LATER = {
    "against_eager",
    "bound",
    "capture_error_mode",
    "capture_process_id",
    "code",
    "command",
    "contents",
    "eager_work",
    "effective_mode",
    "exchange_moved_bytes",
    "exchange_needed_bytes",
    "finish_graphs",
    "finish_graphs_bytes",
    "host_pace_ns",
    "hot_repeats",
    "instrumented",
    "launch_model",
    "launches_outside",
    "left_out",
    "max_graph_memory_bytes",
    "memory_sample_ms",
    "modes",
    "neighbours",
    "node_model",
    "p90_ns",
    "p99_ns",
    "parallel",
    "parity_process_id",
    "power_milliwatts",
    "process_id",
    "processes",
    "replay_costs",
    "replay_samples",
    "requested_mode",
    "round_robin_process_id",
    "sampled_peak_bytes",
    "slow_host_repeats",
    "sm_clock_mhz",
    "spread_real_tokens",
    "stand_alone",
    "stand_alone_keys",
    "strict",
    "timelines",
    "times",
    "timing_process_id",
    "trace_launches",
    "vetoes",
    "vote",
    "worth",
}


@cache
def kept_run(name: str | None = None) -> RunRecord:
    """A run as it was kept; without a name one of a single GPU whose host was quiet."""
    return read_run(RUNS / (name or QUIET))


def write_as_version_2(folder: Path, name: str = QUIET) -> None:
    """Writes the summary of a kept run as the first folders of schema version 2 had it."""
    summary = _earlier(json.loads((RUNS / name / "summary.json").read_text()))
    summary["schema_version"] = 2
    for rank in summary["ranks"]:
        del rank["notes"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(summary))


def _earlier(value: object) -> object:
    if isinstance(value, dict):
        return {name: _earlier(under) for name, under in value.items() if name not in _LATER}
    return [_earlier(one) for one in value] if isinstance(value, list) else value


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
