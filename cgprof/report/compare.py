"""Two runs side by side: matched keys with intervals, unmatched keys with reasons, one verdict."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from cgprof.record.store import read_items, read_run, read_samples
from cgprof.report.changes import LAUNCH_RULES, ORDER_RULE, RULE, Change, Verdict, worst
from cgprof.report.comparable import Difference, other_differences, require_comparable
from cgprof.report.headline import recorder_line
from cgprof.report.layout import Cell, Table, format_ratio, one_line, ratio
from cgprof.report.pairing import (
    FIGURES,
    JUDGED,
    Pair,
    Side,
    Unmatched,
    matched,
    twins_beside_plain,
    unmatched,
)
from cgprof.report.scores import ScorePair, compare_scores, verdicts_table

_JUDGED_LINE = (
    f"judged: launch and device time ({', '.join(JUDGED)}), parity, keys lost, scores by replay; "
    "shown only: eager, nodes, memory (one reading each, no interval)"
)
_COLUMNS = {
    "key": "key",
    "replay_a_ns": "replay A",
    "replay_b_ns": "replay B",
    **{name: f"{name} B/A" for name in FIGURES},
    "nodes_ratio": "nodes B/A",
    "memory_bytes": "memory B-A",
    "parity_a": "parity A",
    "parity_b": "parity B",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What changed from A to B. `forced` lists what would have refused the comparison."""

    a: Side
    b: Side
    forced: tuple[Difference, ...]
    differences: tuple[Difference, ...]
    pairs: tuple[Pair, ...]
    twins: tuple[Pair, ...]
    unmatched: tuple[Unmatched, ...]
    scores: tuple[ScorePair, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """One word for the whole; twins beside plain keys are shown and not judged."""
        found = [pair.verdict for pair in self.pairs]
        found += [one.verdict for one in self.unmatched if one.verdict]
        return worst(found + [score.verdict for score in self.scores if score.verdict])

    def to_text(self) -> str:
        """Returns the comparison for reading."""
        blocks = [self._head(), _pairs_table(self.pairs).to_text()]
        if self.twins:
            blocks.append(_twins_table(self.twins).to_text())
        alone = [one_line(f"{one.label}: {one.reason}") for one in self.unmatched]
        blocks.append("\n".join(["keys without a partner", *(alone or ["(none)"])]))
        if self.scores:
            blocks.append("\n".join(["accuracy", *(pair.to_text() for pair in self.scores)]))
            blocks.append(_verdicts_table(self.scores).to_text())
        memory = [
            f"{name}: {side.memory.to_text() if side.memory else 'graph memory: -'}"
            for name, side in (("A", self.a), ("B", self.b))
        ]
        memory.append(f"graph memory B/A: {format_ratio(self._memory_ratio())}")
        blocks.append("\n".join([*memory, *self._rules(), f"verdict: {self.verdict}"]))
        return "\n\n".join(blocks)

    def to_json(self) -> str:
        """Returns the comparison as strict JSON: a ratio that does not exist is null."""
        document = {
            "verdict": self.verdict,
            "rule": self._rules(),
            "judged": list(JUDGED),
            "recorder": self.a.record.recorder,
            "forced": [asdict(difference) for difference in self.forced],
            "differences": [asdict(difference) for difference in self.differences],
            "a": _json_side(self.a),
            "b": _json_side(self.b),
            "memory_ratio": self._memory_ratio(),
            "keys": [_json_pair(pair) for pair in self.pairs],
            "twins": [_json_pair(pair) for pair in self.twins],
            "unmatched": [asdict(one) for one in self.unmatched],
            "accuracy": [_json_score(pair) for pair in self.scores],
        }
        return json.dumps(document, indent=2, allow_nan=False)

    def _head(self) -> str:
        lines = [
            *(f"FORCED, NOT COMPARABLE: {difference.to_text()}" for difference in self.forced),
            f"A: {self.a.path} ({self.a.record.run_id})",
            f"B: {self.b.path} ({self.b.record.run_id})",
            recorder_line(self.a.record),
            *(f"differs: {difference.to_text()}" for difference in self.differences),
        ]
        return "\n".join(lines)

    def _rules(self) -> list[str]:
        return [*RULE, LAUNCH_RULES[self.a.record.recorder], _JUDGED_LINE, ORDER_RULE]

    def _memory_ratio(self) -> float | None:
        a, b = self.a.memory, self.b.memory
        return ratio(b.whole_bytes, a.whole_bytes) if a and b else None


def compare_runs(path_a: str | Path, path_b: str | Path, *, force: bool = False) -> Comparison:
    """Returns what changed from run folder A to run folder B.

    Raises:
        RecordError: a folder is unreadable.
        UnsupportedError: the runs are not comparable, and not forced or cannot be.
    """
    return compare_sides(_read_side(path_a), _read_side(path_b), force=force)


def compare_sides(a: Side, b: Side, *, force: bool = False) -> Comparison:
    """Returns what changed from A to B.

    Raises:
        UnsupportedError: the runs are not comparable, and not forced or cannot be.
    """
    forced = require_comparable(a.record, b.record, force=force)
    return Comparison(
        a=a,
        b=b,
        forced=forced,
        differences=other_differences(a.record, b.record),
        pairs=tuple(matched(a, b)),
        twins=tuple(twins_beside_plain(a, b)),
        unmatched=tuple(unmatched(a, b)),
        scores=compare_scores(a.record.accuracy, a.items, b.record.accuracy, b.items),
    )


def _read_side(path: str | Path) -> Side:
    folder = Path(path)
    return Side(
        path=str(path),
        record=read_run(folder),
        samples=read_samples(folder),
        items=read_items(folder),
    )


def _pairs_table(pairs: tuple[Pair, ...]) -> Table:
    return Table(
        title="keys of both runs",
        columns=_COLUMNS | {"verdict": "verdict"},
        rows=tuple((*_cells(pair), pair.verdict) for pair in pairs),
    )


def _verdicts_table(scores: tuple[ScorePair, ...]) -> Table:
    return verdicts_table([pair.found for pair in scores if pair.found], "scores of both runs")


def _twins_table(pairs: tuple[Pair, ...]) -> Table:
    return Table(
        title="twins of B beside the plain key of the same size in A (shown, not judged)",
        columns=_COLUMNS,
        rows=tuple(map(_cells, pairs)),
    )


def _cells(pair: Pair) -> tuple[Cell, ...]:
    replay = pair.changes["replay"]
    return (
        pair.label_b,
        replay.a_ns,
        replay.b_ns,
        *(_with_interval(pair.changes[name]) for name in FIGURES),
        ratio(pair.nodes_b, pair.nodes_a),
        pair.memory_delta_bytes,
        pair.parity_a,
        pair.parity_b,
    )


def _with_interval(change: Change) -> str | None:
    if change.ratio is None:
        return None
    if change.low is None or change.high is None:
        return f"{format_ratio(change.ratio)} [no interval]"
    return f"{format_ratio(change.ratio)} [{change.low:.2f}, {change.high:.2f}]"


def _json_side(side: Side) -> dict[str, object]:
    memory = side.memory
    return {
        "path": side.path,
        "run_id": side.record.run_id,
        "status": side.record.status,
        "memory_source": memory.source if memory else None,
        "plain_bytes": memory.plain_bytes if memory else None,
        "total_bytes": memory.whole_bytes if memory else None,
        "headline": memory.to_text() if memory else None,
    }


def _json_score(pair: ScorePair) -> dict[str, object]:
    return {
        "task": pair.task,
        "kind": pair.kind,
        "phase": pair.phase,
        "reason": pair.reason,
        "verdict": pair.verdict,
        "found": pair.found.model_dump(mode="json") if pair.found else None,
    }


def _json_pair(pair: Pair) -> dict[str, object]:
    changes = {
        name: asdict(change) | {"verdict": change.verdict} for name, change in pair.changes.items()
    }
    return {
        **asdict(pair),
        "changes": changes,
        "launch_verdict": pair.launch_verdict,
        "memory_delta_bytes": pair.memory_delta_bytes,
        "verdict": pair.verdict,
    }
