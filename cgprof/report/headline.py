"""The lines that every report repeats: graph memory, who recorded, and how it was measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cgprof.record.graph import GraphRecord, LaunchStats
from cgprof.record.types import RankRecord, RunRecord
from cgprof.report.accuracy import accuracy_line
from cgprof.report.layout import format_ratio, one_line, ratio
from cgprof.report.memory_sum import MOVED, RELEASED, memory_sums
from cgprof.shapes import DecisionReason
from cgprof.units import format_bytes, format_gib

_SMALLEST_GIB = 1024**3 // 100
_EAGER_BECAUSE = {
    DecisionReason.NO_FIT: "no captured key fits",
    DecisionReason.RANK_EAGER: "another rank runs eager",
    DecisionReason.EMPTY_MICROBATCH: "a microbatch would be empty",
    DecisionReason.IDLE: "nothing to run",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphMemoryLine:
    """What all graphs of a rank weigh; `total_bytes` is None without twins."""

    source: str
    plain_bytes: int
    total_bytes: int | None
    outputs_bytes: int
    doubt: str = ""  # why the device's growth is not this process's

    @property
    def whole_bytes(self) -> int:
        """Plain keys, and twins if there are any."""
        return self.plain_bytes if self.total_bytes is None else self.total_bytes

    @property
    def twins_ratio(self) -> float | None:
        """How many times the plain keys weigh with twins beside them; None without either."""
        return None if self.whole_bytes < 0 else ratio(self.total_bytes, self.plain_bytes)

    def to_text(self) -> str:
        """Returns the headline, with its source when that is not the device, and its doubt."""
        label = "graph memory" if self.source == "device" else "graph memory, tape arena"
        doubt = f"; {self.doubt}" if self.doubt else ""
        if self.total_bytes is None:
            return f"{label}: {size_text(self.plain_bytes)}{doubt}"
        return (
            f"{label}: {size_text(self.plain_bytes)} plain -> {size_text(self.total_bytes)} with "
            f"twins ({format_ratio(self.twins_ratio)}){doubt}"
        )


def graph_memory(rank: RankRecord) -> GraphMemoryLine | None:
    """Returns the memory headline of a rank, or None before its totals are known."""
    totals = rank.totals
    if totals is None:
        return None
    has_twins = any(graph.key.is_twin and graph.failure is None for graph in rank.graphs)
    return GraphMemoryLine(
        source=totals.source,
        plain_bytes=totals.plain_bytes,
        total_bytes=totals.plain_bytes + totals.twin_bytes if has_twins else None,
        outputs_bytes=totals.outputs_bytes,
        doubt=_doubt(rank),
    )


def key_memory_bytes(record: RunRecord, graph: GraphRecord) -> int | None:
    """Returns what one key added: the device delta, or on a tape the growth of its arena.

    None where memory was given back meanwhile: that is no usage.
    """
    if record.recorder == "tape":
        return graph.memory.pool_bytes if graph.memory else None
    delta = graph.witness.device_delta_bytes if graph.witness else None
    return None if delta is None or delta < 0 else delta


def headline_lines(record: RunRecord) -> list[str]:
    """Returns each rank's memory and step counts, and what one device cannot show of DBO."""
    lines = []
    for rank in record.ranks:
        memory = graph_memory(rank)
        prefix = f"rank {rank.rank}: " if len(record.ranks) > 1 else ""
        if memory is not None:
            lines.append(prefix + memory.to_text())
        steps = _steps_line(rank)
        if steps:
            lines.append(prefix + steps)
    accuracy = accuracy_line(record)
    if accuracy:
        lines.append(accuracy)
    if record.config.microbatch.enabled and len(record.ranks) <= 1:
        lines.append("exchange is a loopback: there was nothing to hide")
    return lines


def policy_line(record: RunRecord) -> str:
    """Returns what became of the policy that was asked for; nothing where it runs as asked."""
    plan = record.plan
    if not plan.policy_reason:
        return ""
    return (
        f"policy: {plan.requested_policy.value} requested, {plan.policy.value} effective "
        f"({one_line(plan.policy_reason)})"
    )


def recorder_line(record: RunRecord) -> str:
    """Returns who recorded, and whose times are shown."""
    if record.recorder == "tape":
        return "recorder: tape, a CPU stand-in: all times are CPU stand-in times, never GPU times"
    return "recorder: cuda: launch times are host times, device times come from device events"


def measured_lines(record: RunRecord) -> list[str]:
    """Returns how each number of the capture table was measured."""
    graphs = [graph for rank in record.ranks for graph in rank.graphs]
    samples = _median_of(
        stages.launch
        for graph in graphs
        for stages in (graph.eager, graph.replay, graph.round_robin)
        if stages is not None
    )
    idle = "queue empty before" if record.recorder == "tape" else "GPU idle before"
    lines = [
        recorder_line(record),
        f"eager, replay, round robin: host time from first to last enqueue, {idle}, {samples}",
        "replay: the same key again (hot); round robin: keys in turn",
    ]
    if record.recorder == "tape":
        lines.append("nodes: operators on the tape; memory: growth of the tape arena by this key")
        return lines
    lines.append("device: device events around launch, hot replay, median")
    cache = kv_cache_text(record)
    beside = f" beside a KV cache of {cache}" if cache else ""
    lines.append(
        f"memory: device delta around capture{beside}, keys in capture order; the driver reuses "
        "its arenas, so a later key may look free"
    )
    return lines


def kv_cache_text(record: RunRecord) -> str:
    """Returns the size of the KV cache that was there during all captures; nothing before."""
    sizes = {rank.totals.kv_cache_bytes for rank in record.ranks if rank.totals is not None}
    return ", ".join(map(format_bytes, sorted(sizes)))


def _median_of(stats: Iterable[LaunchStats]) -> str:
    counts = sorted({one.count for one in stats})
    if not counts:
        return "no samples"
    few, many = counts[0], counts[-1]
    return f"median of {few} samples" if few == many else f"median of {few} to {many} samples"


def _steps_line(rank: RankRecord) -> str:
    if not rank.decisions:
        return ""
    counts = dict.fromkeys(DecisionReason, 0)
    for decision in rank.decisions:
        counts[decision.reason] += decision.count
    total, spread = sum(counts.values()), counts[DecisionReason.SPREAD]
    replayed = counts[DecisionReason.GRAPH] + spread
    line = f"steps served: {total} = {replayed} replayed, {total - replayed} eager"
    why = [
        text if counts[reason] == total - replayed else f"{counts[reason]}: {text}"
        for reason, text in _EAGER_BECAUSE.items()
        if counts[reason]
    ]
    split = sum(decision.count for decision in rank.decisions if decision.eager_split)
    spreads = [f"{spread} replayed a twin with spread tokens"] if spread else []
    facts = "; ".join([*why, *([f"{split} of them split"] if split else []), *spreads])
    return f"{line} ({facts})" if facts else line


def _doubt(rank: RankRecord) -> str:
    whole = next((one for one in memory_sums(rank) if one.what == "all"), None)
    if whole is None or whole.verdict not in (MOVED, RELEASED):
        return ""
    own = whole.nvml_bytes
    known = "unknown" if own is None or own < 0 else size_text(own)
    return f"{whole.verdict}, this process by NVML: {known}"


def size_text(num_bytes: int) -> str:
    """Returns a size in GiB from a hundredth of one on; a negative one as what was released."""
    if num_bytes < 0:
        return f"{size_text(-num_bytes)} released"
    return format_gib(num_bytes) if abs(num_bytes) >= _SMALLEST_GIB else format_bytes(num_bytes)
