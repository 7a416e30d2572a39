"""Greedy runs through real scheduling: with graphs, eager at equal padding, eager unpadded.

The schedule does not depend on the tokens, so that all runs make the same steps. At equal padding
and split the tokens must be equal; unpadded shows how far eager differs from itself. Identical
prompts may part where kernels choose their order by a row's place in the batch: what eager does
as well is no fault of a graph.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from cgprof.accuracy.schedule import Arrival, make_schedule
from cgprof.engine.types import Step
from cgprof.engine.worker import Engine
from cgprof.graphs.dispatch import eager_key
from cgprof.record.scores import GreedyResult, TokenDivergence
from cgprof.shapes import GraphKey, RuntimeMode, StepDecision

Mode = Literal["replay", "eager", "unpadded"]


@dataclass(slots=True)
class GreedyRun:
    """What one run generated, by request, and what it saw on the way."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    best: dict[str, list[float]] = field(default_factory=dict)  # best logit of each token
    gaps: dict[str, list[float]] = field(default_factory=dict)  # best minus second best
    prompts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    replays: Counter[GraphKey] = field(default_factory=Counter)
    steps: int = 0
    longest_context: int = 0
    nonfinite: int = 0


def check_greedy(engine: Engine, *, steps: int) -> GreedyResult:
    """Serves one schedule in three modes and compares. Call inside `active()`, with no requests.

    Raises:
        ConfigError: `steps` is too small, or more than a request may have.
    """
    engine.live.clear()
    schedule = make_schedule(
        engine.config.limits,
        engine.model_config.vocab_size,
        steps=steps,
        num_blocks=engine.pool.num_blocks - 1,
        seed=engine.config.seed,
    )
    replay = serve_schedule(engine, schedule, "replay")
    eager = serve_schedule(engine, schedule, "eager")
    unpadded = serve_schedule(engine, schedule, "unpadded")
    return judge(engine, replay, eager, unpadded)


def serve_schedule(engine: Engine, schedule: Sequence[Arrival], mode: Mode) -> GreedyRun:
    """Serves the requests with continuous batching, each from its step on, in one mode."""
    runner, scheduler = engine.runner, engine.scheduler
    run, coming = GreedyRun(), deque(schedule)
    while coming or scheduler.has_work:
        while coming and (coming[0].step <= run.steps or not scheduler.has_work):
            request = coming.popleft().request
            run.prompts[request.request_id] = request.prompt
            scheduler.submit(request)
        step = scheduler.schedule()
        if step is None:
            continue
        decision = _in_mode(runner.decide(step), step, mode)
        prepared = runner.prepare(step, decision)
        hidden = runner.launch(prepared, count=False)
        tokens = runner.finish(prepared, hidden).wait().copy()
        if decision.key.mode is RuntimeMode.FULL:
            run.replays[decision.key] += 1
        _note(engine, run, step, hidden[: step.shape.num_tokens])
        scheduler.advance(step, tokens)
    return run


def judge(engine: Engine, replay: GreedyRun, eager: GreedyRun, unpadded: GreedyRun) -> GreedyResult:
    """Returns the verdict on a replay run; the unpadded run gives the noise floor."""
    noise_diff = _logit_diff(unpadded, eager)
    explained_below = 2 * noise_diff if math.isfinite(noise_diff) else 0.0
    divergences = divergences_of(replay, eager, explained_below)
    same, parted, parted_eager = _identical(replay, eager)
    diff = _logit_diff(replay, eager)
    notes, passed = [], True if not divergences else None
    missing = _kinds(engine.graphs.keys) - _kinds(replay.replays)
    if missing or not replay.replays:
        passed = None
        notes.append(f"not verified: no {' and no '.join(sorted(missing)) or 'graph'} replayed")
    if divergences and all(one.explained for one in divergences):
        notes.append("inconclusive: each first difference lies within the noise of two eager sizes")
    elif divergences:
        passed = False
    if parted > 1:
        alike = parted_eager > 1 and not engine.config.model.batch_invariant
        notes.append(
            "identical prompts part in eager as well, as they may without batch invariance"
            if alike
            else "identical prompts part"
        )
        passed = passed if alike else False
    if replay.nonfinite:
        notes.append("NaN or infinity")
        passed = False
    return GreedyResult(
        passed=passed,
        requests=len(replay.tokens),
        steps=replay.steps,
        longest_context=replay.longest_context,
        replays={str(key): count for key, count in replay.replays.items()},
        tokens_compared=sum(map(len, replay.tokens.values())),
        divergences=divergences,
        max_logit_diff=diff if math.isfinite(diff) else None,
        noise_divergences=divergences_of(eager, unpadded, explained_below),
        noise_logit_diff=noise_diff if math.isfinite(noise_diff) else None,
        identical=same,
        identical_outputs=parted,
        identical_outputs_eager=parted_eager,
        nonfinite=replay.nonfinite,
        note="; ".join(notes),
    )


def divergences_of(
    run: GreedyRun, other: GreedyRun, explained_below: float
) -> tuple[TokenDivergence, ...]:
    """Returns the first difference of every request that has one.

    It is explained where both gaps are at most `explained_below`: two logits that move by the
    noise of eager sizes may then change places.
    """
    found = []
    for name, tokens in run.tokens.items():
        index = _first_difference(tokens, other.tokens[name])
        if index is None:
            continue
        gaps = (run.gaps[name][index], other.gaps[name][index])
        found.append(
            TokenDivergence(
                request=name,
                index=index,
                tokens=(tokens[index], other.tokens[name][index]),
                gaps=(_finite(gaps[0]), _finite(gaps[1])),
                explained=all(gap <= explained_below for gap in gaps),
            )
        )
    return tuple(found)


def _in_mode(decision: StepDecision, step: Step, mode: Mode) -> StepDecision:
    if mode == "replay":
        return decision
    whole = eager_key(step.shape.num_tokens)
    key = decision.key.as_eager() if mode == "eager" else whole
    return dataclasses.replace(decision, key=key)


def _note(engine: Engine, run: GreedyRun, step: Step, hidden: torch.Tensor) -> None:
    """Keeps tokens, best logits and gaps of the requests that sample; counts what is not finite."""
    table = engine.table
    ends = np.cumsum(step.query_lens, dtype=np.int64) - 1
    scores = engine.model.logits(hidden[torch.from_numpy(ends)])
    run.nonfinite += int((~hidden.isfinite()).sum()) + int((~scores.isfinite()).sum())
    top = scores.topk(2, dim=-1)
    values, tokens = top.values.tolist(), scores.argmax(dim=-1).tolist()
    reached = table.num_computed[step.rows] + step.query_lens
    run.steps += 1
    run.longest_context = max(run.longest_context, int(reached.max()))
    for index in np.flatnonzero(reached == table.num_tokens[step.rows]):
        name = table.requests[int(step.rows[index])].request_id
        best, second = values[index]
        run.tokens.setdefault(name, []).append(tokens[index])
        run.best.setdefault(name, []).append(best)
        run.gaps.setdefault(name, []).append(best - second)


def _logit_diff(run: GreedyRun, other: GreedyRun) -> float:
    """The largest difference of best logits where both had the same tokens before; NaN stays."""
    largest = 0.0
    for name, tokens in run.tokens.items():
        index = _first_difference(tokens, other.tokens[name])
        end = len(tokens) if index is None else index + 1
        mine, theirs = np.array(run.best[name][:end]), np.array(other.best[name][:end])
        largest = np.maximum(largest, np.abs(mine - theirs).max(initial=0.0))
    return float(largest)


def _first_difference(tokens: Sequence[int], other: Sequence[int]) -> int | None:
    pairs = enumerate(zip(tokens, other, strict=True))
    return next((index for index, (mine, theirs) in pairs if mine != theirs), None)


def _identical(replay: GreedyRun, eager: GreedyRun) -> tuple[int, int, int]:
    """How many requests share the commonest prompt, and how many outputs they have in each run."""
    prompt, count = Counter(replay.prompts.values()).most_common(1)[0]
    names = [name for name, other in replay.prompts.items() if other == prompt]
    if count < 2:
        return 0, 0, 0
    outputs = [len({tuple(run.tokens[name]) for name in names}) for run in (replay, eager)]
    return count, outputs[0], outputs[1]


def _kinds(keys: Sequence[GraphKey] | Counter[GraphKey]) -> set[str]:
    return {"twin" if key.is_twin else "plain graph" for key in keys}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
