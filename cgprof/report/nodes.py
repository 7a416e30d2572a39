"""What is inside the graphs of a run: one line a key, or one key in full."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher

from cgprof.errors import ConfigError
from cgprof.graphs.topology import KERNEL, KernelChange, Node, changes, difference
from cgprof.record.contents import GraphContents
from cgprof.record.graph import GraphRecord
from cgprof.record.types import RankRecord, RunRecord
from cgprof.report.document import Document, Lines
from cgprof.report.kernel_names import by_short_name
from cgprof.report.layout import Cell, Table

_RECORDERS = {
    "cuda": "recorder: cuda",
    "tape": "recorder: tape, a CPU stand-in: its kernels are operators, one after the other",
}
_COUNTED = {
    KERNEL: "kernels",
    "memcpy": "copies",
    "memset": "memsets",
    "collective": "collectives",
    "peer-copy": "peer copies",
    "event-record": "event records",
    "event-wait": "event waits",
}
_SHAPE = {
    "edges": "edges",
    "forks": "forks",
    "joins": "joins",
    "width": "width",
    "longest_path": "longest path",
    "communication": "communication",
}
_TOKENS = re.compile("[0-9]{1,9}")  # the first number of a label
_MOST_SUGGESTED = 3
_NOT_READ = "edges and kernels were not read; a run reads them once all is timed"
_SHAPE_NOTES = (
    "width: most nodes equally far from a root; longest path: nodes on it; forks, joins: nodes "
    "that several wait for, that wait for several",
    "communication: kernels of NCCL and the like, collectives, copies between devices",
)


def nodes_document(run: RunRecord) -> Document:
    """Returns one row a key of the first rank; people see only the kinds that occur."""
    rank = run.ranks[0]
    occurring = {kind for graph in rank.graphs for kind in _kinds(rank, graph)}
    seen = [kind for kind in _COUNTED if kind == KERNEL or kind in occurring]
    return Document(
        blocks=[Lines(lines=_head(run)), _keys_table(rank, seen)],
        tables=[_keys_table(rank, list(_COUNTED))],
        data=lambda: {
            **_source(run),
            "keys": {graph.label: _graph_data(rank, graph) for graph in rank.graphs},
        },
    )


def key_document(run: RunRecord, label: str, nodes: Sequence[Node] | None) -> Document:
    """Returns one key in full; `nodes` are for programs, None where they were not asked for.

    Raises:
        ConfigError: There is no such key, or its capture failed.
    """
    rank = run.ranks[0]
    graph = find_graph(run, label)
    found, plain = rank.contents.get(label), _plain_of(rank, graph)
    tables = [_kinds_table(_kinds(rank, graph), plain)]
    compared: tuple[KernelChange, ...] = ()
    if found is not None:
        tables.append(_kernels_table(found))
        if plain is not None:
            compared = difference(plain[1], found)
            tables.append(_changes_table(*plain, found))
    return Document(
        blocks=[Lines(lines=[*_head(run), *_key_lines(graph, found, plain)]), *tables],
        tables=tables,
        data=lambda: {
            **_source(run),
            "key": label,
            **_graph_data(rank, graph),
            "plain": None if plain is None else plain[0],
            "against_plain": [{**one._asdict(), "added": one.added} for one in compared],
            "nodes": None if nodes is None else [node._asdict() for node in nodes],
        },
    )


def find_graph(run: RunRecord, label: str) -> GraphRecord:
    """Returns the record of a captured key of the first rank.

    Raises:
        ConfigError: There is no such key, or its capture failed.
    """
    graphs = {graph.label: graph for graph in run.ranks[0].graphs}
    graph = graphs.get(label)
    if graph is None:
        near = _nearest(label, graphs)
        way_out = f"near it: {', '.join(near)}" if near else "no key was captured"
        raise ConfigError("KEY", f"{label!r} is no key of run {run.run_id}; {way_out}")
    if graph.failure is not None:
        raise ConfigError("KEY", f"{label} has no graph, its capture failed: {graph.failure}")
    return graph


def _nearest(label: str, graphs: Mapping[str, GraphRecord]) -> list[str]:
    """Labels of the nearest tokens, among equals of the likest spelling."""
    tokens = _TOKENS.search(label)

    def distance(one: str) -> tuple[int, float]:
        apart = 0 if tokens is None else abs(graphs[one].key.num_tokens - int(tokens[0]))
        return apart, -SequenceMatcher(None, label, one).ratio()

    return sorted(graphs, key=distance)[:_MOST_SUGGESTED]


def _head(run: RunRecord) -> list[str]:
    lines = [_RECORDERS[run.recorder]]
    if len(run.ranks) > 1:
        lines.append(f"rank {run.ranks[0].rank} of {len(run.ranks)}: only its nodes are kept")
    return lines


def _source(run: RunRecord) -> dict[str, object]:
    return {
        "run": run.run_id,
        "recorder": run.recorder,
        "rank": run.ranks[0].rank,
        "num_ranks": len(run.ranks),
    }


def _kinds(rank: RankRecord, graph: GraphRecord) -> dict[str, int]:
    found = rank.contents.get(graph.label)
    return graph.nodes if found is None else found.kinds


def _keys_table(rank: RankRecord, kinds: Sequence[str]) -> Table:
    return Table(
        name="keys",
        title="nodes by kind, and the shape of each graph",
        columns={
            "key": "key",
            "nodes": "nodes",
            **{kind.replace("-", "_"): _COUNTED[kind] for kind in kinds},
            "other": "other",
            "kernel_names": "kernel names",
            **_SHAPE,
        },
        rows=tuple(_row(rank, graph, kinds) for graph in rank.graphs),
        notes=_SHAPE_NOTES if rank.contents else (_NOT_READ,),
    )


def _row(rank: RankRecord, graph: GraphRecord, shown: Sequence[str]) -> tuple[Cell, ...]:
    kinds, found = _kinds(rank, graph), rank.contents.get(graph.label)
    if not kinds:  # its capture failed
        return (graph.label, *[None] * (len(shown) + len(_SHAPE) + 3))
    return (
        graph.label,
        sum(kinds.values()),
        *(kinds.get(kind, 0) for kind in shown),
        sum(count for kind, count in kinds.items() if kind not in _COUNTED),
        None if found is None else len(found.kernels),
        *(None if found is None else getattr(found, name) for name in _SHAPE),
    )


def _graph_data(rank: RankRecord, graph: GraphRecord) -> dict[str, object]:
    found = rank.contents.get(graph.label)
    return {
        "kinds": _kinds(rank, graph),
        "contents": None if found is None else found.model_dump(mode="json", exclude={"kinds"}),
        "failure": graph.failure,
    }


def _plain_of(rank: RankRecord, graph: GraphRecord) -> tuple[str, GraphContents] | None:
    """The plain key of a twin, where this run has both."""
    if not graph.key.is_twin:
        return None
    read = {one.key: one.label for one in rank.graphs if one.label in rank.contents}
    plain = graph.key.plain_among(read)
    return None if plain is None else (read[plain], rank.contents[read[plain]])


def _key_lines(
    graph: GraphRecord,
    found: GraphContents | None,
    plain: tuple[str, GraphContents] | None,
) -> Iterator[str]:
    if found is None:
        yield f"key: {graph.label}"
        yield _NOT_READ
        return
    yield f"key: {graph.label}, {sum(found.kinds.values())} nodes"
    yield f"roots: {found.roots}, " + ", ".join(
        f"{title}: {getattr(found, name)}" for name, title in _SHAPE.items()
    )
    if graph.key.is_twin and plain is None:
        yield "not compared with its plain key: this run has none, or did not read its nodes"


def _kinds_table(kinds: Mapping[str, int], plain: tuple[str, GraphContents] | None) -> Table:
    before = {} if plain is None else plain[1].kinds
    names = sorted(kinds.keys() | before.keys(), key=lambda kind: (-kinds.get(kind, 0), kind))
    rows: list[tuple[Cell, ...]] = []
    for kind in names:
        count, of_plain = kinds.get(kind, 0), before.get(kind, 0)
        compared = (None, None) if plain is None else (of_plain, count - of_plain)
        rows.append((kind, count, *compared))
    return Table(
        name="kinds",
        title="nodes by kind",
        columns={"kind": "kind", "nodes": "nodes", "plain": "plain key", "added": "added"},
        rows=tuple(rows),
        optional=frozenset({"plain", "added"}),
    )


def _kernels_table(found: GraphContents) -> Table:
    beside = by_short_name(found.off_path)
    return Table(
        name="kernels",
        title="kernels",
        columns={"kernel": "kernel", "nodes": "nodes", "off_path": "beside the longest path"},
        rows=tuple(
            (name, count, beside.get(name, 0))
            for name, count in by_short_name(found.kernels).items()
        ),
        notes=("names without template arguments; json has them in full",),
    )


def _changes_table(label: str, plain: GraphContents, twin: GraphContents) -> Table:
    compared = changes(*map(by_short_name, (plain.kernels, twin.kernels, twin.off_path)))
    return Table(
        name="against-plain",
        title=f"kernels against the plain key {label}",
        columns={
            "kernel": "kernel",
            "plain": "plain",
            "twin": "twin",
            "added": "added",
            "moved": "moved",
        },
        rows=tuple((one.name, one.plain, one.twin, one.added, one.moved) for one in compared),
        notes=("moved: of the twin's, those beside its longest path",),
    )
