"""What the nodes of a graph mean: its paths, its width, its kernels, and a twin's against a plain.

Values only: no torch. Nodes stand in an order in which each comes after those it waits for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from cgprof.record.contents import GraphContents

KERNEL = "kernel"
CHILD = "child"
PEER_COPY = "peer-copy"
COLLECTIVE = "collective"  # of a tape
# Source: names of NCCL's and NVSHMEM's device code, of torch's symmetric memory, and of our kernels
# that write to peers or wait for them.
_COMMUNICATION = ("nccl", "nvshmem", "c10d::", "_peer_")


class Node(NamedTuple):
    """One node; `after` are the indices of the nodes it waits for, all smaller than its own."""

    kind: str
    name: str  # of a kernel or operator, as torch's profiler prints it; empty for other kinds
    after: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RawNode:
    """A node as a driver gives it; `inner` is the graph of a child node."""

    kind: str
    name: str = ""
    inner: RawGraph | None = None


@dataclass(frozen=True, slots=True)
class RawGraph:
    """Nodes in any order, and edges as pairs of indices, from and to; an edge may come twice."""

    nodes: Sequence[RawNode]
    edges: Iterable[tuple[int, int]]


def flatten(graph: RawGraph) -> tuple[Node, ...]:
    """Returns the nodes in order, each child node replaced by the graph in it.

    The roots of a child wait for what the child waited for; what waited for it waits for its
    leaves. An order that was given and is possible is kept.
    """
    nodes: list[Node] = []
    _flatten(graph, (), nodes)
    return tuple(nodes)


def contents(nodes: Sequence[Node]) -> GraphContents:
    """Returns the shape of a graph and its kernels; in time linear in nodes and edges.

    Of several longest paths the one is taken that ends, and at each step comes from, the node of
    the lowest index.
    """
    depths = _depths(nodes)
    successors = Counter(before for node in nodes for before in node.after)
    on_path = set(longest_path(nodes))
    kernels = Counter(node.name for node in nodes if node.kind == KERNEL)
    off_path = Counter(
        node.name
        for index, node in enumerate(nodes)
        if node.kind == KERNEL and index not in on_path
    )
    kinds = Counter(node.kind for node in nodes)
    return GraphContents(
        kinds=dict(kinds),
        edges=successors.total(),
        roots=sum(not node.after for node in nodes),
        forks=sum(count > 1 for count in successors.values()),
        joins=sum(len(node.after) > 1 for node in nodes),
        width=max(Counter(depths).values(), default=0),
        longest_path=len(on_path),
        kernels=dict(kernels),
        off_path=dict(off_path),
        communication=sum(map(communicates, nodes)),
        peer_copies=kinds[PEER_COPY],
    )


def communicates(node: Node) -> bool:
    """Whether a node moves data between devices, or waits for other devices."""
    if node.kind == KERNEL:
        name = node.name.lower()
        return any(word in name for word in _COMMUNICATION)
    return node.kind in (PEER_COPY, COLLECTIVE)


def longest_path(nodes: Sequence[Node]) -> tuple[int, ...]:
    """Returns the indices of the nodes of a longest path, first to last, as `contents` takes it."""
    if not nodes:
        return ()
    depths = _depths(nodes)
    path = [depths.index(max(depths))]
    while before := nodes[path[-1]].after:
        path.append(min(before, key=lambda index: (-depths[index], index)))
    return tuple(reversed(path))


class KernelChange(NamedTuple):
    """How often a kernel runs in a plain graph and in its twin."""

    name: str
    plain: int
    twin: int
    moved: int  # of the twin's, those beside its longest path

    @property
    def added(self) -> int:
        """What the twin runs more of it; below zero where it runs less."""
        return self.twin - self.plain


def difference(plain: GraphContents, twin: GraphContents) -> tuple[KernelChange, ...]:
    """Returns every kernel of either graph, what the twin has most added first."""
    return changes(plain.kernels, twin.kernels, twin.off_path)


def changes(
    plain: Mapping[str, int], twin: Mapping[str, int], off_path: Mapping[str, int]
) -> tuple[KernelChange, ...]:
    """Returns the same of counts by names of any kind, such as shortened ones."""
    found = [
        KernelChange(name, plain.get(name, 0), twin.get(name, 0), off_path.get(name, 0))
        for name in plain.keys() | twin.keys()
    ]
    return tuple(sorted(found, key=lambda change: (-change.added, change.name)))


def _depths(nodes: Sequence[Node]) -> list[int]:
    """How many nodes the longest path to each node has, itself included."""
    depths: list[int] = []
    for node in nodes:
        depths.append(1 + max((depths[before] for before in node.after), default=0))
    return depths


def _flatten(graph: RawGraph, entry: tuple[int, ...], nodes: list[Node]) -> tuple[int, ...]:
    """Adds a graph whose roots wait for `entry`; returns what waits for it has to wait for."""
    before, order = _in_order(graph)
    exits: dict[int, tuple[int, ...]] = {}
    waited_for: set[int] = set()
    for index in order:
        node = graph.nodes[index]
        after = _union(exits[one] for one in before[index]) if before[index] else entry
        waited_for |= before[index]
        if node.inner is None:
            nodes.append(Node(node.kind, node.name, after))
            exits[index] = (len(nodes) - 1,)
        else:
            exits[index] = _flatten(node.inner, after, nodes)
    leaves = [exits[index] for index in order if index not in waited_for]
    return _union(leaves) if leaves else entry


def _in_order(graph: RawGraph) -> tuple[list[set[int]], list[int]]:
    """The predecessors of each node, and an order in which they come first."""
    before: list[set[int]] = [set() for _ in graph.nodes]
    behind: list[set[int]] = [set() for _ in graph.nodes]
    for source, target in graph.edges:
        before[target].add(source)
        behind[source].add(target)
    missing = [len(found) for found in before]
    ready = [index for index, count in enumerate(missing) if not count]
    heapify(ready)
    order = []
    while ready:
        order.append(heappop(ready))
        for target in behind[order[-1]]:
            missing[target] -= 1
            if not missing[target]:
                heappush(ready, target)
    return before, order


def _union(groups: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted({index for group in groups for index in group}))
