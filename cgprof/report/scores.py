"""Scores of tasks: a run's own as tables, and two runs' beside each other by the paired test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cgprof.record.paired import paired_verdict
from cgprof.record.scores import AccuracyResult, ItemScore, PairedVerdict
from cgprof.report.accuracy import coverage_text, verdict_text
from cgprof.report.changes import Verdict
from cgprof.report.layout import Table, one_line

_SCORE_COLUMNS = {
    "task": "task",
    "kind": "kind",
    "phase": "phase",
    "n": "n",
    "correct": "right",
    "no_answer": "no answer",
    "value": "score",
    "se": "SE",
    "low": "low",
    "high": "high",
    "perplexity": "perplexity",
    "nonfinite": "non-finite",
    "verified": "replayed",
}
_VERDICT_COLUMNS = {
    "task": "task",
    "kind": "kind",
    "a": "A",
    "b": "B",
    "n_a": "n A",
    "n_b": "n B",
    "value_a": "score A",
    "value_b": "score B",
    "delta": "B-A",
    "low": "low",
    "high": "high",
    "test": "test",
    "p_value": "p",
    "only_a": "A alone right",
    "only_b": "B alone right",
    "items_different": "items different",
    "detectable": "detectable",
    "verdict": "verdict",
}
_VERIFIED = {None: None, True: "yes", False: "not verified"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorePair:
    """One task's score in one phase of two runs; a reason in place of a verdict where one lacks."""

    task: str
    kind: str
    phase: str
    found: PairedVerdict | None = None
    reason: str = ""

    @property
    def verdict(self) -> Verdict | None:
        """Replay scores are judged, eager ones shown; None where there is nothing to judge."""
        if self.found is None or self.phase == "eager":
            return None
        if self.found.verdict == "same":
            return "same"
        if self.found.verdict != "different":
            return "inconclusive"
        return "regression" if _is_worse(self.found) else "improved"

    def to_text(self) -> str:
        """Returns the task, the phase, and what was found."""
        found = self.reason if self.found is None else verdict_text(self.found)
        return one_line(f"{self.task}, {self.kind}, {self.phase}: {found}")


def scores_table(results: Sequence[AccuracyResult]) -> Table:
    """Returns one row a task and phase; the notes say which items, how scored, what replayed."""
    rows = tuple(
        (
            result.task,
            result.kind,
            result.phase,
            result.n,
            result.correct,
            result.no_answer,
            result.value,
            result.se,
            result.low,
            result.high,
            result.perplexity,
            result.nonfinite,
            _VERIFIED[result.verified],
        )
        for result in results
    )
    notes = [
        f"{result.task}, {result.kind}, {result.phase}: {result.subset_rule}, seed "
        f"{'-' if result.seed is None else result.seed}; {result.prompt_rule}; "
        f"{result.scoring_rule}; {coverage_text(result)}{_tokens_by_key(result)}"
        for result in results
    ]
    meaning = "score: share right, or negative log-likelihood a token; low, high: 95 % interval"
    return Table(
        name="accuracy",
        title="accuracy",
        columns=_SCORE_COLUMNS,
        rows=rows,
        notes=(meaning, *map(one_line, notes)) if rows else (),
    )


def verdicts_table(verdicts: Sequence[PairedVerdict], title: str = "paired verdicts") -> Table:
    """Returns one row a verdict; the notes give flags and rules."""
    rows = tuple(
        (
            verdict.task,
            verdict.kind,
            verdict.a,
            verdict.b,
            verdict.n_a,
            verdict.n_b,
            verdict.value_a,
            verdict.value_b,
            verdict.delta,
            verdict.low,
            verdict.high,
            verdict.test,
            verdict.p_value,
            verdict.only_a,
            verdict.only_b,
            verdict.items_different,
            verdict.detectable,
            verdict.verdict,
        )
        for verdict in verdicts
    )
    flags = [f"unlike: {v.task}, {v.b}: {'; '.join(v.flags)}" for v in verdicts if v.flags]
    rules = dict.fromkeys(f"{verdict.kind}: {verdict.rule}" for verdict in verdicts)
    return Table(
        name="verdicts",
        title=title,
        columns=_VERDICT_COLUMNS,
        rows=rows,
        notes=tuple(one_line(note) for note in (*flags, *rules)),
    )


def compare_scores(
    scores_a: Sequence[AccuracyResult],
    items_a: Sequence[ItemScore],
    scores_b: Sequence[AccuracyResult],
    items_b: Sequence[ItemScore],
) -> tuple[ScorePair, ...]:
    """Returns every task and phase that either run scored, paired by items where both kept them."""
    by_a, by_b = ({_place(score): score for score in scores} for scores in (scores_a, scores_b))
    pairs = []
    for task, kind, phase in dict.fromkeys([*by_a, *by_b]):
        a, b = by_a.get((task, kind, phase)), by_b.get((task, kind, phase))
        if a is None or b is None:
            reason = f"scored only in {'B' if a is None else 'A'}"
            pairs.append(ScorePair(task=task, kind=kind, phase=phase, reason=reason))
            continue
        found = paired_verdict(a, _items_of(a, items_a), b, _items_of(b, items_b))
        pairs.append(ScorePair(task=task, kind=kind, phase=phase, found=found))
    return tuple(pairs)


def _is_worse(verdict: PairedVerdict) -> bool:
    """Whether B is the worse one; one that is not finite is."""
    if verdict.delta is None:
        return verdict.value_b is None
    return verdict.delta > 0 if verdict.kind == "likelihood" else verdict.delta < 0


def _place(score: AccuracyResult) -> tuple[str, str, str]:
    return score.task, score.kind, score.phase


def _items_of(score: AccuracyResult, items: Sequence[ItemScore]) -> list[ItemScore]:
    return [item for item in items if (item.task, item.kind, item.phase) == _place(score)]


def _tokens_by_key(result: AccuracyResult) -> str:
    if result.phase == "eager" or not result.tokens_by_key:
        return ""
    listed = ", ".join(f"{label} {count}" for label, count in result.tokens_by_key.items())
    return f"; scored tokens by key: {listed}"
