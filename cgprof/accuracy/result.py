"""Answers of all items -> rows and one score with its error, interval and coverage."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from cgprof.accuracy.coverage import Coverage
from cgprof.accuracy.tasks import Item, Task
from cgprof.record.scores import AccuracyResult, ItemScore
from cgprof.shapes import GraphKey
from cgprof.stats.paired import (
    mean_interval,
    proportion_error,
    ratio_of_sums,
    wilson_interval,
)

ScoreMode = Literal["eager", "replay"]
_LARGEST_EXPONENT = 700.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one item got; fields as in `ItemScore`, a score may be NaN."""

    output: str
    token_ids: tuple[int, ...]
    score: float
    correct: bool | None = None
    answered: bool = True
    choice_scores: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A score and the items that it is made of."""

    result: AccuracyResult
    items: tuple[ItemScore, ...]


def make_scored(
    task: Task, mode: ScoreMode, answers: Sequence[Answer], coverage: Coverage, scoring_rule: str
) -> Scored:
    """Returns the score of a task from one answer an item, in the order of the items."""
    rows = tuple(
        _row(task, mode, item, answer) for item, answer in zip(task.items, answers, strict=True)
    )
    estimate = _likelihood(rows) if task.kind == "likelihood" else _share(rows)
    result = AccuracyResult(
        task=task.name,
        kind=task.kind,
        phase=mode,
        n=len(rows),
        no_answer=sum(not row.answered for row in rows),
        nonfinite=sum(row.score is None for row in rows),
        subset_rule=task.subset_rule,
        prompt_rule=task.prompt_rule,
        scoring_rule=scoring_rule,
        seed=task.seed,
        items_fingerprint=fingerprint_of(task.items),
        about=coverage.about if mode == "replay" else None,
        replays=_by_label(coverage.replays),
        tokens_by_key=_by_label(coverage.tokens),
        tokens_plain=coverage.count(twins=False),
        tokens_twin=coverage.count(twins=True),
        tokens_eager=coverage.num_eager,
        **asdict(estimate),
    )
    return Scored(result=result, items=rows)


def fingerprint_of(items: Sequence[Item]) -> str:
    """Returns a hash of what is asked: ids, prompts, golds and choices, in their order."""
    asked = [(item.item_id, item.prompt, item.gold, item.choices) for item in items]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


def _by_label(counts: Counter[GraphKey]) -> dict[str, int]:
    return {str(key): count for key, count in counts.most_common() if count}


def _row(task: Task, mode: ScoreMode, item: Item, answer: Answer) -> ItemScore:
    return ItemScore(
        task=task.name,
        kind=task.kind,
        phase=mode,
        item_id=item.item_id,
        prompt=item.prompt,
        gold=item.gold,
        output=answer.output,
        token_ids=answer.token_ids,
        score=_finite(answer.score),
        correct=answer.correct,
        answered=answer.answered,
        choice_scores=tuple(map(_finite, answer.choice_scores)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Estimate:
    """Fields as in `AccuracyResult`."""

    value: float | None
    se: float | None = None
    low: float | None = None
    high: float | None = None
    correct: int | None = None
    perplexity: float | None = None


def _share(rows: Sequence[ItemScore]) -> _Estimate:
    correct, n = sum(bool(row.correct) for row in rows), len(rows)
    low, high = wilson_interval(correct, n)
    error = proportion_error(correct / n, n)
    return _Estimate(value=correct / n, se=error, low=low, high=high, correct=correct)


def _likelihood(rows: Sequence[ItemScore]) -> _Estimate:
    """Negative log-likelihood a token over all tokens; items, not tokens, are drawn anew."""
    scores = [row.score for row in rows if row.score is not None]
    if len(scores) < len(rows):
        return _Estimate(value=None)
    counts = np.array([len(row.token_ids) for row in rows], np.float64)
    value, error = ratio_of_sums(-np.array(scores, np.float64), counts)
    perplexity = math.exp(value) if value < _LARGEST_EXPONENT else None
    if error is None:
        return _Estimate(value=value, perplexity=perplexity)
    low, high = mean_interval(value, error)
    return _Estimate(value=value, se=error, low=low, high=high, perplexity=perplexity)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
