"""What one traced replay of a key spent its time on: compute, communication, both or neither."""

from __future__ import annotations

from collections.abc import Iterator

from cgprof.record.overlap import TracedReplay
from cgprof.record.types import RankRecord
from cgprof.report.layout import Cell, Table

_COLUMNS = {
    "key": "key",
    "span_ns": "span",
    "compute_ns": "compute",
    "communication_ns": "communication",
    "both_ns": "both at once",
    "neither_ns": "neither",
    "hidden_share": "hidden share",
    "activities": "activities",
    "transfers": "transfers",
    "streams": "streams",
    "nodes": "nodes on device",
    "agrees": "as the graph",
}
_ONE_REPLAY = (
    "from one traced replay: tracing stretches it, so read the order and the overlap, not the times"
)


def overlap_table(rank: RankRecord) -> Table:
    """Returns one row a key whose replay was traced; a twin stands below its plain key."""
    return Table(
        name="overlap",
        title="overlap of communication and compute",
        columns=_COLUMNS,
        rows=tuple(_row(label, replay) for label, replay in rank.timelines.items()),
        notes=tuple(_notes(rank)) if rank.timelines else (),
    )


def _row(label: str, replay: TracedReplay) -> tuple[Cell, ...]:
    return (
        label,
        replay.span_ns,
        replay.compute_ns,
        replay.communication_ns,
        replay.both_ns,
        replay.neither_ns,
        replay.hidden,
        replay.activities,
        replay.transfers,
        replay.streams,
        replay.nodes,
        None if replay.agrees is None else ("yes" if replay.agrees else "NO"),
    )


def _notes(rank: RankRecord) -> Iterator[str]:
    yield _ONE_REPLAY
    yield "hidden share: both at once / communication; overlapping activities count once"
    yield (
        "transfer: a kernel of NCCL and the like, its wait for other ranks included, or a copy "
        "between devices; on one device every copy, since nothing but the loopback copies"
    )
    if not all(replay.agrees for replay in rank.timelines.values()):
        yield "where the activities are not as the graph, the run's notes say how they differ"
