"""What was planned, and what each key's graph is: tables of a full report."""

from __future__ import annotations

from collections.abc import Mapping

from cgprof.record.graph import GraphRecord
from cgprof.record.types import PlanRecord, RankRecord
from cgprof.report.layout import Table, one_line, ratio
from cgprof.units import format_ranges


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


def _other_nodes(graph: GraphRecord) -> str | None:
    return _counts({kind: n for kind, n in graph.nodes.items() if kind != "kernel"})


def _counts(numbers: Mapping[str, int]) -> str | None:
    return ", ".join(f"{count} {kind}" for kind, count in numbers.items()) or None
