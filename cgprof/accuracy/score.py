"""Scores of a task in one mode, with the replays behind them; and both modes side by side.

The two modes run the same batches at the same padded sizes. A score stands with what it was made
of: items and their rule, error and interval, and how many scored tokens came from which key.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from cgprof.accuracy.answers import Grade, grade
from cgprof.accuracy.coverage import Coverage, ends_at_last_token
from cgprof.accuracy.likelihood import Forced, forced_log_probs, refill_mark
from cgprof.accuracy.result import Answer, Scored, ScoreMode, make_scored
from cgprof.accuracy.tasks import Task
from cgprof.batch.request import Request
from cgprof.engine.engine import serve
from cgprof.engine.types import PreparedStep
from cgprof.engine.worker import Engine
from cgprof.errors import ConfigError
from cgprof.models.tokenizer import Tokenizer
from cgprof.record.paired import paired_verdict
from cgprof.record.scores import PairedVerdict

Normalise = Literal["tokens", "characters"]


def score_task(engine: Engine, tokenizer: Tokenizer, task: Task, mode: ScoreMode) -> Scored:
    """Returns the score of a task by what its kind asks for.

    Raises:
        ConfigError: An item does not fit the engine.
    """
    if task.kind == "generate":
        return score_generation(engine, tokenizer, task, mode)
    if task.kind == "likelihood":
        return score_likelihood(engine, tokenizer, task, mode)
    return score_choices(engine, tokenizer, task, mode)


def score_both(
    engine: Engine, tokenizer: Tokenizer, task: Task
) -> tuple[Scored, Scored, PairedVerdict]:
    """Returns the eager score, the replay score, and their paired verdict.

    Raises:
        ConfigError: An item does not fit the engine.
    """
    eager = score_task(engine, tokenizer, task, "eager")
    replay = score_task(engine, tokenizer, task, "replay")
    verdict = paired_verdict(
        eager.result,
        eager.items,
        replay.result,
        replay.items,
        names=("eager", "replay"),
        seed=engine.config.seed,
    )
    return eager, replay, verdict


def score_generation(
    engine: Engine,
    tokenizer: Tokenizer,
    task: Task,
    mode: ScoreMode,
    *,
    max_new_tokens: int | None = None,
) -> Scored:
    """Returns how many greedy answers are right; a text without an answer is counted apart.

    Raises:
        ConfigError: An item does not fit the engine.
    """
    limit = max_new_tokens or task.max_new_tokens
    requests = [
        Request(
            request_id=str(index),
            prompt=tuple(tokenizer.encode(item.prompt)),
            max_new_tokens=limit,
            stop_token=tokenizer.eos_id,
        )
        for index, item in enumerate(task.items)
    ]
    coverage = Coverage(engine)

    def choose(prepared: PreparedStep, hidden: torch.Tensor) -> NDArray[np.int64]:
        coverage.add(prepared, int(ends_at_last_token(engine, prepared).sum()))
        return engine.runner.finish(prepared, hidden).wait()

    outputs = serve(
        engine,
        requests,
        as_eager=mode == "eager",
        choose=choose,
        refill_below=refill_mark(engine),
    )
    coverage.stop()
    answers = []
    for index, item in enumerate(task.items):
        tokens = outputs[str(index)]
        text = tokenizer.decode([token for token in tokens if token != tokenizer.eos_id])
        found = grade_text(task, text, item.gold)
        answers.append(
            Answer(
                output=text,
                token_ids=tokens,
                score=float(found == "right"),
                correct=found == "right",
                answered=found != "no answer",
            )
        )
    rule = "first #### answer, else last number" if task.match == "number" else "exact text"
    return make_scored(task, mode, answers, coverage, f"{rule}; at most {limit} new tokens")


def grade_text(task: Task, text: str, gold: str) -> Grade:
    """Returns the grade of a generated text, which ends before the task's stop text."""
    if task.stop:
        text = text.partition(task.stop)[0]
    if task.match == "number":
        return grade(text, gold)
    if not text.strip():
        return "no answer"
    return "right" if text.strip() == gold else "wrong"


def score_likelihood(engine: Engine, tokenizer: Tokenizer, task: Task, mode: ScoreMode) -> Scored:
    """Returns the negative log-likelihood a token of the gold texts, by forced decoding.

    Raises:
        ConfigError: An item does not fit the engine.
    """
    sequences = [split_tokens(tokenizer, item.prompt, item.gold) for item in task.items]
    log_probs, coverage = forced_log_probs(engine, sequences, mode)
    answers = [
        Answer(output=item.gold, token_ids=sequence.gold, score=_sum(scores))
        for item, sequence, scores in zip(task.items, sequences, log_probs, strict=True)
    ]
    return make_scored(task, mode, answers, coverage, "forced decoding, all gold tokens")


def score_choices(
    engine: Engine,
    tokenizer: Tokenizer,
    task: Task,
    mode: ScoreMode,
    *,
    normalise: Normalise = "characters",
) -> Scored:
    """Returns how often the right choice has the best log-probability a character, or a token.

    Raises:
        ConfigError: An item does not fit the engine.
    """
    sequences = [
        split_tokens(tokenizer, item.prompt, choice)
        for item in task.items
        for choice in item.choices
    ]
    log_probs, coverage = forced_log_probs(engine, sequences, mode)
    scored = zip(sequences, map(_sum, log_probs), strict=True)
    answers = []
    for item in task.items:
        parts = [next(scored) for _ in item.choices]
        by_choice = np.array([total for _, total in parts])
        lengths = [len(choice) for choice in item.choices]
        if normalise == "tokens":
            lengths = [len(sequence.gold) for sequence, _ in parts]
        values = by_choice / lengths
        best, right = int(np.argmax(values)), item.choices.index(item.gold)
        is_finite = bool(np.isfinite(values).all())
        margin = values[right] - np.delete(values, right).max() if is_finite else np.nan
        answers.append(
            Answer(
                output=item.choices[best],
                token_ids=parts[best][0].gold,
                score=float(margin),
                correct=is_finite and best == right,
                answered=is_finite,
                choice_scores=tuple(values.tolist()),
            )
        )
    return make_scored(task, mode, answers, coverage, f"best log-probability by {normalise}")


def _sum(log_probs: NDArray[np.float32]) -> float:
    return float(log_probs.sum(dtype=np.float64))


def split_tokens(tokenizer: Tokenizer, prompt: str, continuation: str) -> Forced:
    """Returns the tokens of prompt and continuation, cut where the prompt's own tokens end.

    Where a token reaches over the cut, the two are encoded apart.

    Raises:
        ConfigError: Either has no token.
    """
    head = tokenizer.encode(prompt)
    whole = tokenizer.encode(prompt + continuation)
    joined = len(whole) > len(head) and whole[: len(head)] == head
    tail = whole[len(head) :] if joined else tokenizer.encode(continuation, special_tokens=False)
    if not (head and tail):
        raise ConfigError("item", f"{prompt[-40:]!r} + {continuation[:40]!r} has an empty part")
    return Forced(prompt=tuple(head), gold=tuple(tail))
