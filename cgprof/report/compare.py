"""Two runs side by side: matched keys with intervals, unmatched keys with reasons, one verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from cgprof.record.store import read_items, read_run, read_samples
from cgprof.record.types import RunRecord
from cgprof.report.changes import LAUNCH_RULES, ORDER_RULE, RULE, Change, Verdict, worst
from cgprof.report.comparable import Difference, other_differences, require_comparable
from cgprof.report.document import Block, Document, Lines
from cgprof.report.headline import recorder_line
from cgprof.report.layout import Cell, Interval, Table, format_ratio, one_line, ratio
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
    **{f"{name.replace(' ', '_')}_interval": f"{name} B/A" for name in FIGURES},
    "host_ratio": "host loop B/A",
    "nodes_ratio": "nodes B/A",
    "memory_delta_bytes": "memory B-A",
    "parity_a": "parity A",
    "parity_b": "parity B",
}
_OPTIONAL = frozenset({"host_ratio"})  # where neither run timed its host


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

    def to_document(self) -> Document:
        """Returns the comparison; a ratio that does not exist is null, with its reason."""
        pairs, twins, alone = _pairs_table(self.pairs), _twins_table(self.twins), self._unmatched()
        scores = _verdicts_table(self.scores)
        blocks: list[Block] = [Lines(lines=self._head()), pairs]
        if self.twins:
            blocks.append(twins)
        listed = [one_line(f"{one.label}: {one.reason}") for one in self.unmatched]
        blocks.append(Lines(title=alone.title, lines=listed))
        if self.scores:
            blocks += [
                Lines(title="accuracy", lines=[one.to_text() for one in self.scores]),
                scores,
            ]
        memory = [
            f"{name}: {side.memory.to_text() if side.memory else 'graph memory: -'}"
            for name, side in (("A", self.a), ("B", self.b))
        ]
        memory.append(f"graph memory B/A: {format_ratio(self._memory_ratio())}")
        blocks.append(Lines(lines=[*memory, *self._rules(), f"verdict: {self.verdict}"]))
        return Document(blocks=blocks, tables=[pairs, twins, alone, scores], data=self._data)

    def _data(self) -> object:
        return {
            "verdict": self.verdict,
            "rule": self._rules(),
            "judged": list(JUDGED),
            "recorder": self.a.record.recorder,
            "forced": [asdict(difference) for difference in self.forced],
            "differences": [asdict(difference) for difference in self.differences],
            "a": _json_side(self.a),
            "b": _json_side(self.b),
            "memory_ratio": self._memory_ratio(),
            "memory_ratio_reason": self._no_memory_ratio(),
            "keys": [_json_pair(pair) for pair in self.pairs],
            "twins": [_json_pair(pair) for pair in self.twins],
            "unmatched": [asdict(one) for one in self.unmatched],
            "accuracy": [_json_score(pair) for pair in self.scores],
        }

    def _head(self) -> list[str]:
        return [
            *(f"FORCED, NOT COMPARABLE: {difference.to_text()}" for difference in self.forced),
            *(
                f"{name}: {side.path} ({_name_of(side.record)})"
                for name, side in (("A", self.a), ("B", self.b))
            ),
            recorder_line(self.a.record),
            *(f"differs: {difference.to_text()}" for difference in self.differences),
        ]

    def _unmatched(self) -> Table:
        return Table(
            name="unmatched",
            title="keys without a partner",
            columns={"key": "key", "reason": "reason", "verdict": "verdict"},
            rows=tuple((one.label, one.reason, one.verdict) for one in self.unmatched),
        )

    def _rules(self) -> list[str]:
        return [*RULE, LAUNCH_RULES[self.a.record.recorder], _JUDGED_LINE, ORDER_RULE]

    def _memory_ratio(self) -> float | None:
        a, b = self.a.memory, self.b.memory
        return ratio(b.whole_bytes, a.whole_bytes) if a and b else None

    def _no_memory_ratio(self) -> str | None:
        for name, side in (("A", self.a), ("B", self.b)):
            if side.memory is None:
                return f"no graph memory in {name}"
        return "the graph memory of A is zero" if self._memory_ratio() is None else None


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


def _name_of(record: RunRecord) -> str:
    finished = record.status == "complete"
    return record.run_id if finished else f"{record.run_id}, {record.status}"


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
        name="keys",
        title="keys of both runs",
        columns=_COLUMNS | {"verdict": "verdict"},
        optional=_OPTIONAL,
        rows=tuple((*_cells(pair), pair.verdict) for pair in pairs),
    )


def _verdicts_table(scores: tuple[ScorePair, ...]) -> Table:
    return verdicts_table([pair.found for pair in scores if pair.found], "scores of both runs")


def _twins_table(pairs: tuple[Pair, ...]) -> Table:
    return Table(
        name="twins",
        title="twins of B beside the plain key of the same size in A (shown, not judged)",
        columns=_COLUMNS,
        optional=_OPTIONAL,
        rows=tuple(map(_cells, pairs)),
    )


def _cells(pair: Pair) -> tuple[Cell, ...]:
    replay = pair.changes["replay"]
    return (
        pair.label_b,
        replay.a_ns,
        replay.b_ns,
        *(_interval(pair.changes[name]) for name in FIGURES),
        pair.host_ratio,
        ratio(pair.nodes_b, pair.nodes_a),
        pair.memory_delta_bytes,
        pair.parity_a,
        pair.parity_b,
    )


def _interval(change: Change) -> Interval | None:
    return None if change.ratio is None else Interval(change.ratio, change.low, change.high)


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
        name: asdict(change) | {"reason": change.reason, "verdict": change.verdict}
        for name, change in pair.changes.items()
    }
    return {
        **asdict(pair),
        "changes": changes,
        "launch_verdict": pair.launch_verdict,
        "memory_delta_bytes": pair.memory_delta_bytes,
        "verdict": pair.verdict,
    }
