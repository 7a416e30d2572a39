"""A run over its ranks: least, median and most of each key's times and memory; counts by rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median

from cgprof.record.graph import GraphRecord, LaunchStats
from cgprof.record.types import RunRecord
from cgprof.report.headline import key_memory_bytes
from cgprof.report.layout import Cell, Table
from cgprof.shapes import VetoReason

_STAGES = ("vote", "decide", "prepare", "launch", "finish", "wait", "step", "device")
_VETOES = {
    VetoReason.IDLE: "idle",
    VetoReason.BELOW_THRESHOLD: "below its threshold",
    VetoReason.NOT_UNIFORM: "not uniform",
}
_SPREAD_COLUMNS = ("min", "median", "max")


def rank_tables(record: RunRecord) -> tuple[Table, ...]:
    """Returns what compares ranks; without rows for a run on one rank."""
    return (
        _times_table(record),
        _memory_table(record),
        _replays_table(record),
        _decisions_table(record),
    )


def veto_line(record: RunRecord) -> str:
    """Returns which rank kept steps from being split and why; nothing without DBO or ranks."""
    if len(record.ranks) < 2 or not record.config.microbatch.enabled:
        return ""
    first = record.ranks[0]
    if not first.decisions:
        return ""
    by_rank: dict[int, list[str]] = {}
    for veto in first.vetoes:
        by_rank.setdefault(veto.rank, []).append(f"{_VETOES[veto.reason]}: {veto.count}")
    if not by_rank:
        return "splitting vetoed: in no step"
    texts = [f"rank {rank} ({', '.join(whys)})" for rank, whys in sorted(by_rank.items())]
    return f"splitting vetoed, steps where another rank wished it: {'; '.join(texts)}"


def _times_table(record: RunRecord) -> Table:
    rows = [
        (label, stage, *_spread(times))
        for label, graphs in _by_key(record)
        for stage in _STAGES
        if (times := _stage_times(graphs, stage))
    ]
    return Table(
        name="ranks",
        title=f"hot replays over {len(record.ranks)} ranks",
        columns={
            "key": "key",
            "stage": "stage",
            **{f"{name}_ns": name for name in _SPREAD_COLUMNS},
        },
        rows=tuple(rows),
        notes=(
            "least, median and most of the ranks' medians; vote: waits for the last rank's vote",
            *(["CPU stand-in times, never GPU times"] if record.recorder == "tape" else []),
        ),
    )


def _memory_table(record: RunRecord) -> Table:
    rows = []
    for label, graphs in _by_key(record):
        sizes = [size for graph in graphs if (size := key_memory_bytes(record, graph)) is not None]
        if sizes:
            rows.append((label, *_spread(sizes)))
    source = "tape arena bytes, not GPU memory" if record.recorder == "tape" else "device delta"
    return Table(
        name="rank-memory",
        title=f"memory of each key over {len(record.ranks)} ranks",
        columns={"key": "key", **{f"{name}_bytes": name for name in _SPREAD_COLUMNS}},
        rows=tuple(rows),
        notes=(f"least, median and most of the ranks: {source} around capture",),
    )


def _replays_table(record: RunRecord) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (label, *(graph.replays for graph in graphs))
        for label, graphs in _by_key(record)
        if len(graphs) == len(record.ranks)
    ]
    return Table(
        name="rank-replays",
        title="replays by rank",
        columns={"key": "key", **_rank_columns(record)},
        rows=tuple(rows),
        notes=("all replays of the key in the run, those of measuring and checking too",),
    )


def _decisions_table(record: RunRecord) -> Table:
    def counts(index: int) -> Counter[tuple[str, str]]:
        found: Counter[tuple[str, str]] = Counter()
        for decision in record.ranks[index].decisions:
            found[decision.reason.value, decision.label] += decision.count
        return found

    of_ranks = [counts(index) for index in range(len(record.ranks))] if _several(record) else []
    known = sorted({pair for one in of_ranks for pair in one})
    return Table(
        name="rank-decisions",
        title="steps served, by decision and rank",
        columns={"reason": "reason", "key": "ran as", **_rank_columns(record)},
        rows=tuple((*pair, *(one[pair] for one in of_ranks)) for pair in known),
        notes=("alike on all ranks, or ranks disagreed",),
    )


def _rank_columns(record: RunRecord) -> Mapping[str, str]:
    return {f"rank_{one.rank}": f"rank {one.rank}" for one in record.ranks}


def _several(record: RunRecord) -> bool:
    return len(record.ranks) > 1


def _by_key(record: RunRecord) -> Iterator[tuple[str, list[GraphRecord]]]:
    """Every key with its records in rank order, if there is more than one rank."""
    if not _several(record):
        return
    for graph in record.ranks[0].graphs:
        yield (
            graph.label,
            [one for rank in record.ranks for one in rank.graphs if one.label == graph.label],
        )


def _stage_times(graphs: Sequence[GraphRecord], stage: str) -> list[int]:
    found: list[LaunchStats | None] = [
        getattr(graph.replay, stage) for graph in graphs if graph.replay is not None
    ]
    return [stats.median_ns for stats in found if stats is not None]


def _spread(values: Sequence[int]) -> tuple[Cell, ...]:
    reduce: Sequence[Callable[[Sequence[int]], float]] = (min, median, max)
    return tuple(round(one(values)) for one in reduce)
