"""Checks of graph memory: who holds it, and whether its figures can be trusted. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from cgprof.record.graph import GraphRecord
from cgprof.record.types import RankRecord, RunRecord
from cgprof.report import needs
from cgprof.report.finding import Check, Finding
from cgprof.report.layout import Plain
from cgprof.report.memory_sum import (
    DOES_NOT_ADD_UP,
    RELEASED,
    REST_FLOOR_BYTES,
    REST_SHARE,
    MemorySum,
    memory_sums,
    own_growth_bytes,
    saw_neighbour,
)
from cgprof.units import format_bytes

NEIGHBOURS = "neighbours"
UNEXPLAINED_MEMORY = "unexplained-memory"
NVML_DISAGREES = "nvml-disagrees"
MEMORY_BOUND_TO_NODES = "memory-bound-to-nodes"
COLD_ARENAS = "cold-arenas"
OVER_THE_LIMIT = "over-the-memory-limit"
POOL_NOT_SHARED = "pool-not-shared"

DRIVER_SHARE = 0.5  # of graph memory, outside the pool
LATER_SHARE = 0.25  # of the driver's bytes, taken by the later half of the nodes
POOL_RATIO = 1.3  # of the pool of all keys of a kind over that of the key that took most

_TOLERANCE = f"max({format_bytes(REST_FLOOR_BYTES)}, {REST_SHARE:.0%} of the device delta)"
_MOVED = "another process took or gave back device memory while keys were captured"
_UNEXPLAINED = (
    f"the device delta and the sum of the parts are more than {_TOLERANCE} apart, or more was "
    "given back than taken"
)
_NVML = f"NVML's figure for this process and the device delta are more than {_TOLERANCE} apart"
_BOUND = (
    f"the driver holds more than {DRIVER_SHARE:.0%} of graph memory and more than "
    f"{format_bytes(REST_FLOOR_BYTES)}, {LATER_SHARE:.0%} of it or more for the later half of the "
    "nodes"
)
_POOL = (
    f"the pool of all plain keys, or of all twins, is more than {POOL_RATIO:g} times that of the "
    f"key that took most and more than {format_bytes(REST_FLOOR_BYTES)} above it"
)
_OVER = "graphs took more device memory than --max-graph-memory allows"
_COLD = "a key added no device memory though it has nodes"


def neighbours(run: RunRecord) -> Iterator[Finding]:
    """Finds runs whose device memory was not theirs alone."""
    for rank in run.ranks:
        keys = tuple(graph.label for graph in rank.graphs if saw_neighbour(graph))
        whole = _whole(rank)
        if not keys and (whole is None or not whole.moved):
            continue
        evidence: dict[str, Plain] = {}
        if whole is not None and whole.device_delta_bytes is not None:
            evidence["device_delta_bytes"] = whole.device_delta_bytes
            evidence["this_process_bytes"] = whole.nvml_bytes
            if whole.nvml_bytes is not None:
                others = whole.device_delta_bytes - whole.nvml_bytes
                evidence["taken_by_others_bytes" if others >= 0 else "given_back_bytes"] = abs(
                    others
                )
        yield Finding(
            name=NEIGHBOURS,
            severity="doubt",
            keys=keys,
            evidence=evidence,
            threshold=_MOVED,
            way_out="use NVML's figure for this process, or capture again on a device of its own "
            "(CUDA_VISIBLE_DEVICES)",
            rank=rank.rank,
        )


def unexplained_memory(run: RunRecord) -> Iterator[Finding]:
    """Finds growth that is in no part; neighbours that moved explain it and are told apart."""
    for rank in run.ranks:
        whole = _whole(rank)
        if whole is not None and whole.verdict in (DOES_NOT_ADD_UP, RELEASED):
            yield Finding(
                name=UNEXPLAINED_MEMORY,
                severity="doubt",
                evidence={
                    "device_delta_bytes": whole.device_delta_bytes,
                    "parts_bytes": whole.parts_bytes,
                    "rest_bytes": whole.rest_bytes,
                    "released_bytes": whole.released_bytes,
                },
                threshold=_UNEXPLAINED,
                way_out="see --table memory for the keys whose rest is large; captures that failed "
                "and libraries that start late keep memory that is in no part",
                rank=rank.rank,
            )


def nvml_disagrees(run: RunRecord) -> Iterator[Finding]:
    """Finds runs whose device delta NVML does not confirm, though no neighbour was seen to move."""
    for rank in run.ranks:
        whole = _whole(rank)
        if whole is None or whole.moved:
            continue
        delta, own = whole.device_delta_bytes, whole.nvml_bytes
        if delta is None or own is None or abs(delta - own) <= whole.tolerance_bytes:
            continue
        yield Finding(
            name=NVML_DISAGREES,
            severity="doubt",
            evidence={
                "device_delta_bytes": delta,
                "this_process_bytes": own,
                "apart_bytes": abs(delta - own),
            },
            threshold=_NVML,
            way_out="see who else uses the device (nvidia-smi): a process that came and went "
            "between two readings, or one in another container",
            rank=rank.rank,
        )


def memory_bound_to_nodes(run: RunRecord) -> Iterator[Finding]:
    """Finds runs whose graph memory is the driver's, so that it follows the nodes."""
    for rank in run.ranks:
        whole = _whole(rank)
        own = None if whole is None else whole.own_bytes
        if whole is None or own is None:
            continue
        driver = own - whole.allocator_bytes
        later = _taken_later(rank.graphs)
        if driver <= max(DRIVER_SHARE * own, REST_FLOOR_BYTES) or later < LATER_SHARE * driver:
            continue
        captured = [graph for graph in rank.graphs if graph.failure is None]
        nodes = sum(map(_nodes, captured))
        yield Finding(
            name=MEMORY_BOUND_TO_NODES,
            severity="cost",
            keys=tuple(graph.label for graph in captured),
            evidence={
                "driver_bytes": driver,
                "graph_memory_bytes": own,
                "share": driver / own,
                "nodes": nodes,
                "a_node_bytes": driver // nodes if nodes else None,
            },
            threshold=_BOUND,
            way_out="fewer nodes (fewer kernels a layer) or fewer keys: --cudagraph-capture-sizes, "
            "--max-cudagraph-capture-size, --twins, or a bound by --max-graph-memory",
            rank=rank.rank,
        )


def over_the_limit(run: RunRecord) -> Iterator[Finding]:
    """Finds runs whose last captured keys took more than what was left of their limit."""
    limit = run.config.capture.max_graph_memory_bytes
    for rank in run.ranks:
        whole = _whole(rank)
        own = None if whole is None else whole.own_bytes
        if limit is not None and own is not None and own > limit:
            yield Finding(
                name=OVER_THE_LIMIT,
                severity="doubt",
                evidence={"graph_memory_bytes": own, "limit_bytes": limit},
                threshold=_OVER,
                way_out="a key is left out by an estimate, and the estimate was too low: set the "
                "limit lower by the excess, or capture fewer keys",
                rank=rank.rank,
            )


def pool_not_shared(run: RunRecord) -> Iterator[Finding]:
    """Finds runs whose pool is nearer the sum over the sizes than the largest of them."""
    for rank in run.ranks:
        for twins in (False, True):
            pools = {
                graph.label: graph.memory.pool_bytes
                for graph in rank.graphs
                if graph.key.is_twin is twins and graph.memory is not None
            }
            most, whole = max(pools.values(), default=0), sum(pools.values())
            if whole <= max(POOL_RATIO * most, most + REST_FLOOR_BYTES):
                continue
            yield Finding(
                name=POOL_NOT_SHARED,
                severity="cost",
                keys=tuple(label for label, size in pools.items() if size > 0),
                evidence={"pool_bytes": whole, "largest_key_bytes": most},
                threshold=_POOL,
                way_out="capture the largest size first and let no output outlive its step: what "
                "is held when the next graph is captured cannot be shared",
                rank=rank.rank,
            )


def cold_arenas(run: RunRecord) -> Iterator[Finding]:
    """Finds keys that look free because an arena of the driver was there already."""
    for rank in run.ranks:
        free = [
            graph
            for graph in rank.graphs
            if graph.failure is None
            and _nodes(graph)
            and (size := own_growth_bytes(graph)) is not None
            and size <= 0
        ]
        if free:
            yield Finding(
                name=COLD_ARENAS,
                severity="info",
                keys=tuple(graph.label for graph in free),
                evidence=_alone(rank, free),
                threshold=_COLD,
                way_out="they lie in arenas that earlier graphs or the start left room in, so what "
                "they add depends on the order; judge a key by its stand-alone figure "
                "(measure.stand_alone_keys)",
                rank=rank.rank,
            )


MEMORY_CHECKS: Mapping[str, Check] = {
    NEIGHBOURS: Check(neighbours, (needs.DEVICE, needs.NEIGHBOURS_SEEN)),
    UNEXPLAINED_MEMORY: Check(unexplained_memory, (needs.DEVICE, needs.TOTALS)),
    NVML_DISAGREES: Check(nvml_disagrees, (needs.DEVICE, needs.NVML_TOTALS)),
    MEMORY_BOUND_TO_NODES: Check(memory_bound_to_nodes, (needs.DEVICE, needs.TOTALS)),
    OVER_THE_LIMIT: Check(over_the_limit, (needs.DEVICE, needs.LIMIT, needs.TOTALS)),
    POOL_NOT_SHARED: Check(pool_not_shared, (needs.POOL,)),
    COLD_ARENAS: Check(cold_arenas, (needs.DEVICE, needs.GROWTH)),
}


def _whole(rank: RankRecord) -> MemorySum | None:
    return next((one for one in memory_sums(rank) if one.what == "all"), None)


def _nodes(graph: GraphRecord) -> int:
    return sum(graph.nodes.values())


def _taken_later(graphs: Sequence[GraphRecord]) -> int:
    """What the driver took after half of all nodes were captured."""
    captured = [graph for graph in graphs if graph.failure is None]
    so_far = list(itertools.accumulate(map(_nodes, captured)))
    half = so_far[-1] / 2 if so_far else 0
    return sum(
        (own_growth_bytes(graph) or 0) - (graph.witness.allocator_bytes if graph.witness else 0)
        for graph, count in zip(captured, so_far, strict=True)
        if count > half
    )


def _alone(rank: RankRecord, graphs: Sequence[GraphRecord]) -> dict[str, Plain]:
    """The largest figure of these keys alone: of those measured so, and by the node model."""
    evidence: dict[str, Plain] = {"nodes": sum(map(_nodes, graphs))}
    labels = {graph.label for graph in graphs}
    alone = [
        size
        for one in rank.stand_alone
        if one.label in labels and (size := one.total_bytes) is not None and size >= 0
    ]
    if alone:
        evidence["largest_measured_alone_bytes"] = max(alone)
    model = rank.node_model
    estimate = None if model is None else model.estimate(max(map(_nodes, graphs)))[0]
    if estimate is not None and estimate >= 0:
        evidence["largest_estimated_driver_bytes"] = estimate
    return evidence
