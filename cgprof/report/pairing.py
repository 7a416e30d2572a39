"""Which graph of one run stands beside which graph of another, and why some stand alone.

Keys are those of the first rank. Only what both runs captured is a pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from cgprof.record.graph import GraphRecord, LaunchStats, StageStats
from cgprof.record.scores import ItemScore
from cgprof.record.types import RunRecord
from cgprof.report.changes import Change, Verdict, change_of, launch_verdict, samples_of, worst
from cgprof.report.headline import GraphMemoryLine, graph_memory, key_memory_bytes
from cgprof.report.layout import ratio
from cgprof.report.parity import FAIL, PASS, key_verdict
from cgprof.shapes import GraphKey

JUDGED = ("replay", "round robin", "device")
FIGURES = (*JUDGED, "eager")


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One run folder, read."""

    path: str
    record: RunRecord
    samples: pd.DataFrame
    items: tuple[ItemScore, ...] = ()

    @property
    def graphs(self) -> dict[GraphKey, GraphRecord]:
        """The first rank's graphs, failed ones included."""
        return {graph.key: graph for rank in self.record.ranks[:1] for graph in rank.graphs}

    @property
    def captured(self) -> dict[GraphKey, GraphRecord]:
        """The first rank's graphs that can replay."""
        return {key: graph for key, graph in self.graphs.items() if graph.failure is None}

    @property
    def memory(self) -> GraphMemoryLine | None:
        """The memory headline of the first rank."""
        return graph_memory(self.record.ranks[0]) if self.record.ranks else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two graphs beside each other; `changes` by figure, B over A."""

    recorder: str
    label_a: str
    label_b: str
    changes: dict[str, Change]
    memory_a_bytes: int | None
    memory_b_bytes: int | None
    nodes_a: int | None
    nodes_b: int | None
    parity_a: str
    parity_b: str
    host_ratio: float | None = None  # of the host's own pace beside the key

    @property
    def verdict(self) -> Verdict:
        """The worst of launch time, device time and parity."""
        found = (self.launch_verdict, self.changes["device"].verdict, self._parity_verdict)
        return worst([verdict for verdict in found if verdict])

    @property
    def launch_verdict(self) -> Verdict | None:
        """What hot replay and round robin say together."""
        hot, turns = self.changes["replay"].verdict, self.changes["round robin"].verdict
        return launch_verdict(self.recorder, hot, turns, self.host_ratio)

    @property
    def memory_delta_bytes(self) -> int | None:
        """What B's graph takes more than A's, None where either was not read."""
        if self.memory_a_bytes is None or self.memory_b_bytes is None:
            return None
        return self.memory_b_bytes - self.memory_a_bytes

    @property
    def _parity_verdict(self) -> Verdict | None:
        failed_a, failed_b = self.parity_a.startswith(FAIL), self.parity_b.startswith(FAIL)
        if failed_a != failed_b:
            return "regression" if failed_b else "improved"
        if not self.parity_a.startswith(PASS):
            return None
        return "same" if self.parity_b.startswith(PASS) else "inconclusive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmatched:
    """A key that is no pair, and why; a verdict only where that says something."""

    label: str
    reason: str
    verdict: Verdict | None


def matched(a: Side, b: Side) -> Iterator[Pair]:
    """Yields the keys that both runs captured."""
    for key, graph in b.captured.items():
        if key in a.captured:
            yield _pair(a, a.captured[key], b, graph)


def twins_beside_plain(a: Side, b: Side) -> Iterator[Pair]:
    """Yields B's twins beside A's plain key of the same size, where A captured it."""
    for key, twin in b.captured.items():
        plain = key.plain_among(a.captured) if key.is_twin else None
        if plain is not None:
            yield _pair(a, a.captured[plain], b, twin)


def unmatched(a: Side, b: Side) -> Iterator[Unmatched]:
    """Yields the keys that either run considered to capture and that are no pair."""
    for key, graph in {**a.graphs, **b.graphs}.items():
        absent_a, absent_b = _absence(a, key), _absence(b, key)
        if absent_a is not None and absent_b is not None:
            yield Unmatched(
                label=graph.label, reason=f"{absent_a} in A; {absent_b} in B", verdict=None
            )
        elif absent_b is not None:
            verdict: Verdict | None = "inconclusive" if absent_b.startswith("planned") else None
            verdict = "regression" if absent_b.startswith("failed") else verdict
            yield Unmatched(
                label=graph.label, reason=f"only in A: {absent_b} in B", verdict=verdict
            )
        elif absent_a is not None:
            verdict = "improved" if absent_a.startswith("failed") else None
            yield Unmatched(
                label=graph.label, reason=f"only in B: {absent_a} in A", verdict=verdict
            )


def _absence(side: Side, key: GraphKey) -> str | None:
    graph = side.graphs.get(key)
    if graph is not None:
        return f"failed ({graph.failure})" if graph.failure else None
    skipped = next((one for one in side.record.plan.skipped if one.key == key), None)
    if skipped is not None:
        return f"skipped ({skipped.reason})"
    if str(key) in side.record.plan.labels:
        return f"planned and not recorded (run is {side.record.status})"
    return "not planned"


def _pair(a: Side, graph_a: GraphRecord, b: Side, graph_b: GraphRecord) -> Pair:
    sides = (
        (graph_a.eager, graph_b.eager, "eager", "launch", "eager"),
        (graph_a.replay, graph_b.replay, "hot", "launch", "replay"),
        (graph_a.round_robin, graph_b.round_robin, "round-robin", "launch", "round robin"),
        (graph_a.replay, graph_b.replay, "hot", "device", "device"),
    )
    changes = {
        name: change_of(
            _median_ns(stages_a, stage),
            _median_ns(stages_b, stage),
            samples_of(a.samples, graph_a.label, phase, f"{stage}_ns"),
            samples_of(b.samples, graph_b.label, phase, f"{stage}_ns"),
        )
        for stages_a, stages_b, phase, stage, name in sides
    }
    return Pair(
        recorder=b.record.recorder,
        label_a=graph_a.label,
        label_b=graph_b.label,
        changes=changes,
        memory_a_bytes=key_memory_bytes(a.record, graph_a),
        memory_b_bytes=key_memory_bytes(b.record, graph_b),
        nodes_a=sum(graph_a.nodes.values()) or None,
        nodes_b=sum(graph_b.nodes.values()) or None,
        parity_a=key_verdict(graph_a),
        parity_b=key_verdict(graph_b),
        host_ratio=ratio(graph_b.host_pace_ns, graph_a.host_pace_ns),
    )


def _median_ns(stages: StageStats | None, stage: str) -> int | None:
    stats: LaunchStats | None = getattr(stages, stage, None)
    return stats.median_ns if stats else None
