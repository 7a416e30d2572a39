"""Graph memory as tables: the parts of each key's growth, and the growth over the whole run."""

from __future__ import annotations

from cgprof.record.graph import GraphRecord, MemoryTotals, MemoryWitness
from cgprof.record.types import RankRecord
from cgprof.report.layout import Cell, Table, one_line, show

_LANES = {"captured": "graphs", "eager": "eager calls"}
_STARTED_FIRST = (
    "communicators: device memory as each started, before any capture; the first to start, that of "
    "graphs, holds what NCCL loads once a process as well"
)
_WITNESS_COLUMNS = {
    "allocator_bytes": "allocator",
    "device_delta_bytes": "device delta",
    "nvml_delta_bytes": "NVML",
}


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
        *_finish_rows(totals),
        *(
            (f"communicator of {_LANES.get(lane, lane)}", num_bytes, None, None, None)
            for lane, num_bytes in totals.communicators.items()
        ),
    )
    source = "device delta" if totals.source == "device" else "tape arena bytes, not GPU memory"
    return Table(
        name="totals",
        title="memory of the run",
        columns=columns,
        rows=rows,
        notes=(
            f"headline of plain keys and twins: {source}",
            *_neighbour_notes(totals),
            *([_STARTED_FIRST] if totals.communicators else []),
        ),
    )


def _finish_rows(totals: MemoryTotals) -> list[tuple[Cell, ...]]:
    if totals.finish_graphs_bytes is None:
        return []
    what = "graphs of logits and greedy tokens, before the first capture"
    return [(what, totals.finish_graphs_bytes, None, None, None)]


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


def _neighbour_notes(totals: MemoryTotals) -> list[str]:
    seen = {totals.plain_witness.neighbours, totals.twin_witness.neighbours} - {None}
    worst = next((word for word in ("moved", "unknown", "still", "none") if word in seen), None)
    return [] if worst is None else [f"other processes on the device: {worst}"]
