"""What each graph holds alone, measured or estimated, and its work against an eager step's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cgprof.record.alone import NodeModel, StandAlone
from cgprof.record.contents import WorkDifference
from cgprof.record.graph import GraphRecord
from cgprof.record.types import RankRecord
from cgprof.report.layout import Cell, Table, one_line
from cgprof.report.memory_sum import own_growth_bytes, saw_neighbour
from cgprof.units import format_bytes

_ALONE = {
    "key": "key",
    "nodes": "nodes",
    "marginal_bytes": "marginal, in capture order",
    "alone_bytes": "alone, all of it",
    "pool_bytes": "its pool",
    "driver_bytes": "the driver's part alone",
    "error_bytes": "+-",
    "how": "how",
    "remark": "remark",
}
_WORK = {
    "key": "key",
    "equal": "equal",
    "missing_count": "missing",
    "surplus_count": "surplus",
    "excepted_count": "excepted",
    "missing": "an eager step runs, the graph does not",
    "surplus": "the graph runs, an eager step does not",
    "excepted": "may differ",
    "note": "note",
}
_TEXT_LENGTH = 160
_NAME_LENGTH = 60
_PART = "the driver's part: instantiation, upload and the rest, outside the allocator's pool"


def alone_table(rank: RankRecord) -> Table:
    """Returns one row a captured key: what it added in its place, and what it holds alone."""
    measured = {one.label: one for one in rank.stand_alone}
    rows = [
        _alone_row(graph, measured.get(graph.label), rank.node_model)
        for graph in rank.graphs
        if graph.failure is None and (graph.label in measured or rank.node_model is not None)
    ]
    return Table(
        name="alone",
        title="graphs alone",
        columns=_ALONE,
        rows=tuple(rows),
        notes=_alone_notes(rank) if rows else (),
        optional=frozenset({"alone_bytes", "driver_bytes", "pool_bytes", "error_bytes", "remark"}),
    )


def eager_work_table(rank: RankRecord) -> Table:
    """Returns one row a key whose work was to be compared with an eager step's."""
    rows = tuple(_work_row(label, one) for label, one in rank.against_eager.items())
    return Table(
        name="eager-work",
        title="work of a graph and of an eager step",
        columns=_WORK,
        rows=rows,
        notes=(
            "kernels by name, copies and memsets by kind: nodes of the graph against the launch of "
            "one eager step at the same padding and split, in a process of its own",
        )
        if rows
        else (),
        optional=frozenset({"missing", "surplus", "excepted", "note"}),
    )


def _alone_row(
    graph: GraphRecord, measured: StandAlone | None, model: NodeModel | None
) -> tuple[Cell, ...]:
    nodes = sum(graph.nodes.values())
    marginal, remark = _marginal(graph), _remark(measured)
    if measured is not None and measured.failure is None:
        pool = measured.memory.pool_bytes if measured.memory else None
        whole, driver = measured.total_bytes, measured.driver_bytes
        is_usage = whole is not None and whole >= 0
        alone = whole if is_usage else None
        return (
            *(graph.label, nodes, marginal, alone, pool, driver, None, "measured"),
            remark if is_usage else remark or "memory was released meanwhile",
        )
    if model is None:
        return (graph.label, nodes, marginal, *[None] * 5, remark)
    size, error = model.estimate(nodes)
    unmeasured = (graph.label, nodes, marginal, None, None)
    if size >= 0:
        return (*unmeasured, size, error, "estimate", remark)
    below = f"line at {format_bytes(size)}: no usage, at most {format_bytes(max(size + error, 0))}"
    return (*unmeasured, None, None, "estimate", "; ".join(filter(None, [remark, below])))


def _marginal(graph: GraphRecord) -> int | None:
    """What the key added where it stood; a growth that is negative is no usage."""
    if graph.witness is None:
        return None
    on_device = graph.witness.device_delta_bytes is not None
    found = own_growth_bytes(graph) if on_device else graph.witness.allocator_bytes
    return found if found is not None and found >= 0 else None


def _remark(measured: StandAlone | None) -> str | None:
    if measured is None:
        return None
    if measured.failure is not None:
        return one_line(f"not measured: {measured.failure}", _TEXT_LENGTH)
    kinds = dict.fromkeys(warning.split(":")[0] for warning in measured.warnings)
    return one_line(", ".join(kinds), _TEXT_LENGTH) or None


def _alone_notes(rank: RankRecord) -> tuple[str, ...]:
    graphs = [graph for graph in rank.graphs if graph.failure is None]
    if all(graph.witness is None or graph.witness.device_delta_bytes is None for graph in graphs):
        return (
            "alone: captured by itself in a fresh process; bytes of a tape's arena, no GPU memory",
            "marginal: what the key added to the arena that all tapes share",
        )
    return (
        "marginal: device delta of the capture, in its order; a later key reuses the pool and the "
        "driver's arenas, so that it may read 0 and still hold memory; NVML's figure for this "
        "process where another one moved",
        "alone: captured by itself in a fresh process, warmed up before, beside the least KV cache "
        f"that an engine starts with; {_PART}",
        *([] if rank.node_model is None else _model_notes(rank.node_model, graphs)),
    )


def _model_notes(model: NodeModel, graphs: Sequence[GraphRecord]) -> list[str]:
    slope = model.per_node_bytes
    together, error = model.estimate(sum(sum(graph.nodes.values()) for graph in graphs))
    taken = _driver_in_this_run(graphs)
    beside = "" if taken is None else f"; measured in this run {format_bytes(taken)}"
    return [
        f"estimate, of the driver's part only: {format_bytes(model.base_bytes)} and "
        f"{slope.value:.0f} B a node [{slope.low:.0f}, {slope.high:.0f}], fitted on "
        f"{len(model.fitted_on)} keys with errors up to {format_bytes(model.largest_error_bytes)}; "
        "+- is half the 95 % interval of one more graph, at least one step of the driver's arena",
        f"all {len(graphs)} graphs in one process, the driver's part: estimate "
        f"{format_bytes(together)} +- {format_bytes(error)}{beside}",
        *map(one_line, model.notes),
    ]


def _driver_in_this_run(graphs: Sequence[GraphRecord]) -> int | None:
    """The driver's part over all captures; None where one is not known, or it is no usage."""
    total = 0
    for graph in graphs:
        memory = None if saw_neighbour(graph) else graph.memory
        if memory is None or memory.instantiate_bytes is None or memory.rest_bytes is None:
            return None
        total += memory.instantiate_bytes + memory.rest_bytes
    return total if total >= 0 else None


def _work_row(label: str, one: WorkDifference) -> tuple[Cell, ...]:
    known = one.equal is not None
    return (
        label,
        {True: "yes", False: "NO", None: "not compared"}[one.equal],
        sum(one.missing.values()) if known else None,
        sum(one.surplus.values()) if known else None,
        len(one.excepted) if known else None,
        _named(one.missing),
        _named(one.surplus),
        one_line("; ".join(f"{_short(n)}: {why}" for n, why in one.excepted.items()), _TEXT_LENGTH)
        or None,
        one_line(one.note, _TEXT_LENGTH) or None,
    )


def _named(counts: Mapping[str, int]) -> str | None:
    """The most frequent first; a program finds all names in full in the run's record."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    text = ", ".join(f"{count} x {_short(name)}" for name, count in ordered)
    return one_line(text, _TEXT_LENGTH) or None


def _short(name: str) -> str:
    return one_line(name, _NAME_LENGTH)
