"""What a resumed run keeps of an earlier process: finished timings, parity, accuracy.

Captures, and with them memory, are never kept: those numbers are one process's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from cgprof.measure.warnings import timing_warnings
from cgprof.record.graph import GraphRecord
from cgprof.record.samples import SampleSink
from cgprof.record.scores import AccuracyResult, ItemScore, PairedVerdict
from cgprof.record.types import RunRecord
from cgprof.shapes import GraphKey

_OF_CAPTURE: Mapping[str, object] = {
    "capture_ns": None,
    "instantiate_ns": None,
    "times": None,
    "memory": None,
    "witness": None,
    "sampled_peak_bytes": None,
    "capture_process_id": None,
}
_OF_TIMING = (
    *(
        "eager",
        "replay",
        "first_replay_ns",
        "host_pace_ns",
        "hot_repeats",
        "experts_hit",
        "bound",
        "timing_process_id",
    ),
    *("exchange_moved_bytes", "exchange_needed_bytes"),
)
_OF_TURNS = ("round_robin", "round_robin_process_id")
_OF_PARITY = ("parity", "parity_process_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Finished results of an earlier process; nothing at all for a run that is new."""

    graphs: Mapping[GraphKey, GraphRecord]  # without figures of a capture
    samples: SampleSink
    accuracy: tuple[AccuracyResult, ...] = ()
    verdicts: tuple[PairedVerdict, ...] = ()
    items: tuple[ItemScore, ...] = ()

    def rest(self, captured: Sequence[GraphRecord]) -> tuple[GraphRecord, ...]:
        """Returns what is kept of the keys that are not captured yet."""
        known = {graph.key for graph in captured}
        return tuple(graph for key, graph in self.graphs.items() if key not in known)

    def complete(self, fresh: GraphRecord) -> GraphRecord:
        """Returns a new capture with what is kept of its key.

        A graph of other nodes than before is another graph: nothing is kept of it.
        """
        old = self.graphs.get(fresh.key)
        if old is None:
            return fresh
        if fresh.failure is not None or fresh.nodes != old.nodes:
            self.samples.keep(lambda key, _: key != fresh.label)
            return fresh
        update = {name: getattr(old, name) for name in (*_OF_TIMING, *_OF_TURNS, *_OF_PARITY)}
        update |= {"warnings": (*fresh.warnings, *old.warnings), "replays": old.replays}
        return fresh.model_copy(update=update)


def nothing_kept() -> Kept:
    """Returns what a new run begins with."""
    return Kept(graphs={}, samples=SampleSink())


def keep(record: RunRecord, samples: pa.Table, items: Sequence[ItemScore]) -> Kept:
    """Returns the finished results of a run folder; what was under way is thrown away."""
    graphs = [graph for rank in record.ranks for graph in rank.graphs]
    sampled = set(pc.unique(samples["key"]).to_pylist())
    timed = [graph for graph in graphs if _is_timed(graph) and graph.label in sampled]
    # Keys take turns: they were timed all together, or they have to be again.
    turns = len(timed) == len(record.plan.labels) and all(graph.round_robin for graph in timed)
    kept = {graph.key: _without_capture(graph, turns) for graph in timed}
    labels = {graph.label for graph in timed}
    sink = SampleSink()
    sink.take(samples)
    sink.keep(lambda key, phase: key in labels and (turns or phase != "round-robin"))
    if len(items) != sum(score.n for score in record.accuracy):
        return Kept(graphs=kept, samples=sink)
    return Kept(
        graphs=kept,
        samples=sink,
        accuracy=record.accuracy,
        verdicts=record.verdicts,
        items=tuple(items),
    )


def _is_timed(graph: GraphRecord) -> bool:
    return graph.failure is None and graph.eager is not None and graph.replay is not None


def _without_capture(graph: GraphRecord, turns: bool) -> GraphRecord:
    update = {**_OF_CAPTURE, "warnings": timing_warnings(graph.warnings)}
    if not turns:
        update |= dict.fromkeys(_OF_TURNS)
    return graph.model_copy(update=update)
