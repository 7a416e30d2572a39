"""The parts of a full report, each a table: plan, keys, stages, memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cgprof.record.graph import GraphRecord, MemoryTotals, MemoryWitness, StageStats
from cgprof.record.types import PlanRecord, RankRecord
from cgprof.report.layout import Cell, Table, one_line, ratio, show
from cgprof.units import format_ranges

_STAGE_COLUMNS = {
    "key": "key",
    "phase": "phase",
    "vote_ns": "vote",
    "decide_ns": "decide",
    "prepare_ns": "prepare",
    "launch_ns": "launch",
    "launch_p95_ns": "p95",
    "launch_min_ns": "min",
    "noise": "noise",
    "finish_ns": "finish",
    "wait_ns": "wait",
    "step_ns": "step",
    "device_ns": "device",
    "samples": "n",
    "stopped_by": "stopped by",
    "instrumented": "instrumented",
}
_WITNESS_COLUMNS = {
    "allocator_bytes": "allocator",
    "device_delta_bytes": "device delta",
    "nvml_delta_bytes": "NVML",
}


def plan_table(plan: PlanRecord) -> Table:
    """Returns the keys that were considered and not planned, and the counts of those that were."""
    uncovered = format_ranges(plan.uncovered_batches) or "none"
    rows = tuple((skipped.label, one_line(skipped.reason)) for skipped in plan.skipped)
    return Table(
        name="skipped",
        title=f"plan: {len(plan.labels)} keys, {len(rows)} skipped",
        columns={"key": "skipped key", "reason": "reason"},
        rows=rows,
        notes=(
            f"decode batches that no key covers: {uncovered}",
            f"fingerprint: {plan.fingerprint}",
        ),
    )


def graphs_table(rank: RankRecord) -> Table:
    """Returns what making each graph took, what it holds, and how often it was replayed."""
    columns = {
        "key": "key",
        "requested": "requested",
        "effective": "effective",
        "capture_ns": "capture",
        "instantiate_ns": "instantiate",
        "first_replay_ns": "first replay",
        "kernel_nodes": "kernel nodes",
        "other_nodes": "other nodes",
        "launches_outside": "launches outside",
        "bound": "bound by",
        "experts_hit": "experts hit a layer",
        "exchange_moved_bytes": "exchange moves",
        "exchange_needed_bytes": "needs",
        "exchange_ratio": "moves/needs",
        "sampled_peak_bytes": "sampled peak",
        "replays": "replays",
    }
    rows = tuple(
        (
            graph.label,
            graph.requested_mode,
            graph.effective_mode,
            graph.capture_ns,
            graph.instantiate_ns,
            graph.first_replay_ns,
            graph.nodes.get("kernel"),
            _other_nodes(graph),
            _counts(graph.launches_outside),
            graph.bound,
            graph.experts_hit,
            graph.exchange_moved_bytes,
            graph.exchange_needed_bytes,
            ratio(graph.exchange_moved_bytes, graph.exchange_needed_bytes),
            graph.sampled_peak_bytes,
            graph.replays,
        )
        for graph in rank.graphs
    )
    return Table(
        name="graphs",
        title="graphs",
        columns=columns,
        rows=rows,
        notes=(
            "experts hit: distinct experts that a layer runs, mean over layers",
            *_exchange_notes(rank),
            *_bound_notes(rank),
        ),
        optional=frozenset(
            {
                *("requested", "effective", "launches_outside", "bound", "sampled_peak_bytes"),
                *("exchange_moved_bytes", "exchange_needed_bytes", "exchange_ratio"),
            }
        ),
    )


def remarks_table(rank: RankRecord) -> Table:
    """Returns every failure and warning of a rank's keys in full, for programs."""
    rows = [
        (graph.label, kind, text)
        for graph in rank.graphs
        for kind, texts in (
            ("failure", [graph.failure] if graph.failure else []),
            ("warning", graph.warnings),
        )
        for text in texts
    ]
    return Table(
        name="remarks",
        title="failures and warnings",
        columns={"key": "key", "kind": "kind", "text": "text"},
        rows=tuple(rows),
    )


def stages_table(rank: RankRecord) -> Table:
    """Returns one row a key and phase: the median of each stage, the spread of launch."""
    rows = tuple(row for graph in rank.graphs for row in _stage_rows(graph))
    return Table(
        name="stages",
        title="stages of a step",
        columns=_STAGE_COLUMNS,
        rows=rows,
        optional=frozenset({"vote_ns", "instrumented"}),
        notes=(
            "medians; noise: IQR over median of launch, '-' below five samples; n: launch samples",
            "stages are apart and overlap device time: never added up",
        ),
    )


def memory_table(rank: RankRecord) -> Table:
    """Returns the parts of each key's growth, and three witnesses of that growth side by side."""
    streams = list(
        dict.fromkeys(
            stream
            for graph in rank.graphs
            if graph.memory
            for stream in graph.memory.pool_by_stream
        )
    )
    columns = {
        "key": "key",
        **{f"pool_{stream}_bytes": f"pool {one_line(stream)}" for stream in streams},
        "instantiate_bytes": "instantiate+upload",
        "outputs_bytes": "outputs",
        "workspaces_bytes": "workspaces",
        "rest_bytes": "rest",
        **_WITNESS_COLUMNS,
    }
    return Table(
        name="memory",
        title="memory",
        columns=columns,
        rows=tuple(_memory_row(graph, streams) for graph in rank.graphs),
        notes=(
            "parts are each measured by themselves; rest: device delta minus the parts",
            "allocator, device delta and NVML are three views of one growth: never added up",
            *_workspace_notes(rank),
            *_nvml_notes(rank),
        ),
    )


def totals_table(rank: RankRecord) -> Table:
    """Returns the growth over the whole capture by three witnesses, and what lay there before."""
    totals = rank.totals
    columns = {"what": "what", "headline_bytes": "headline", **_WITNESS_COLUMNS}
    if totals is None:
        return Table(name="totals", title="memory of the run", columns=columns, rows=())
    rows: tuple[tuple[Cell, ...], ...] = (
        ("plain keys", totals.plain_bytes, *_witness_cells(totals.plain_witness)),
        ("twins", totals.twin_bytes, *_witness_cells(totals.twin_witness)),
        ("outputs, before the first capture", totals.outputs_bytes, None, None, None),
        ("KV cache", totals.kv_cache_bytes, None, None, None),
        ("weights", totals.weights_bytes, None, None, None),
    )
    source = "device delta" if totals.source == "device" else "tape arena bytes, not GPU memory"
    return Table(
        name="totals",
        title="memory of the run",
        columns=columns,
        rows=rows,
        notes=(f"headline of plain keys and twins: {source}", *_neighbour_notes(totals)),
    )


def _stage_rows(graph: GraphRecord) -> Iterator[tuple[Cell, ...]]:
    phases = (("eager", graph.eager), ("hot", graph.replay), ("round robin", graph.round_robin))
    for phase, stages in phases:
        if stages is not None:
            yield (graph.label, phase, *_stage_cells(stages))


def _stage_cells(stages: StageStats) -> tuple[Cell, ...]:
    launch = stages.launch
    return (
        stages.vote.median_ns if stages.vote else None,
        stages.decide.median_ns,
        stages.prepare.median_ns,
        launch.median_ns,
        launch.p95_ns,
        launch.min_ns,
        launch.noise,
        stages.finish.median_ns,
        stages.wait.median_ns,
        stages.step.median_ns if stages.step else None,
        stages.device.median_ns if stages.device else None,
        launch.count,
        launch.stopped_by,
        "yes" if stages.instrumented else None,
    )


def _memory_row(graph: GraphRecord, streams: list[str]) -> tuple[Cell, ...]:
    parts = graph.memory
    if parts is None:
        return (graph.label, *[None] * (len(streams) + 4), *_witness_cells(graph.witness))
    return (
        graph.label,
        *(parts.pool_by_stream.get(stream) for stream in streams),
        parts.instantiate_bytes,
        parts.outputs_bytes,
        sum(parts.workspaces.values()),
        parts.rest_bytes,
        *_witness_cells(graph.witness),
    )


def _witness_cells(witness: MemoryWitness | None) -> tuple[Cell, ...]:
    if witness is None:
        return (None, None, None)
    return (witness.allocator_bytes, witness.device_delta_bytes, witness.nvml_delta_bytes)


def _workspace_notes(rank: RankRecord) -> list[str]:
    sizes: dict[str, int] = {}
    for graph in rank.graphs:
        for place, num_bytes in (graph.memory.workspaces if graph.memory else {}).items():
            sizes[place] = max(num_bytes, sizes.get(place, 0))
    return [
        f"largest workspace of {one_line(place)}: {show('_bytes', num_bytes)}"
        for place, num_bytes in sizes.items()
    ]


def _nvml_notes(rank: RankRecord) -> list[str]:
    witnesses = [graph.witness for graph in rank.graphs if graph.witness]
    if rank.totals is not None:
        witnesses += [rank.totals.plain_witness, rank.totals.twin_witness]
    notes = dict.fromkeys(witness.nvml_note for witness in witnesses if witness.nvml_note)
    return [f"NVML: {one_line(note)}" for note in notes]


def _exchange_notes(rank: RankRecord) -> list[str]:
    if all(graph.exchange_needed_bytes is None for graph in rank.graphs):
        return []
    return [
        "exchange, all layers of one full step: moves is what this rank sends to others, by the "
        "shapes; needs is the least for its own tokens, by their routing (one row to each rank "
        "with an expert of a token, one sum back)"
    ]


def _bound_notes(rank: RankRecord) -> list[str]:
    notes = []
    if any(graph.launches_outside for graph in rank.graphs):
        notes.append(
            "launches outside: what a step enqueues beside its graph, in prepare and finish; "
            "launch is the graph alone"
        )
    if any(graph.bound for graph in rank.graphs):
        notes.append(
            "bound by host: launching eagerly takes longer than the device works, a graph helps; "
            "by device: it saves host time only"
        )
    return notes


def _neighbour_notes(totals: MemoryTotals) -> list[str]:
    seen = {totals.plain_witness.neighbours, totals.twin_witness.neighbours} - {None}
    worst = next((word for word in ("moved", "unknown", "still", "none") if word in seen), None)
    return [] if worst is None else [f"other processes on the device: {worst}"]


def _other_nodes(graph: GraphRecord) -> str | None:
    return _counts({kind: n for kind, n in graph.nodes.items() if kind != "kernel"})


def _counts(numbers: Mapping[str, int]) -> str | None:
    return ", ".join(f"{count} {kind}" for kind, count in numbers.items()) or None
