"""The stepping loop: schedule, decide, prepare, launch, finish, wait, advance."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from cgprof.batch.request import Request
from cgprof.engine.types import IDLE_STEP, PreparedStep
from cgprof.engine.worker import Engine
from cgprof.shapes import DecisionReason

ChooseTokens = Callable[[PreparedStep, torch.Tensor], NDArray[np.int64]]


def serve(
    engine: Engine,
    requests: Sequence[Request],
    *,
    as_eager: bool = False,
    choose: ChooseTokens | None = None,
    refill_below: int | None = None,
) -> dict[str, tuple[int, ...]]:
    """Serves the requests with continuous batching and returns the tokens of each by its id.

    Call inside `engine.active()`, with no live requests in the table.

    Args:
        engine: The engine.
        requests: In the order in which they start.
        as_eager: Run each step without its graph, at the same padding and split.
        choose: Returns one token a request [r] from a launched step and its hidden states [T, D];
            left out: the sampled ones, waited for. Tokens of unfinished prompts are dropped.
        refill_below: Start further requests only when fewer than this are under way, and then as
            many as there are rows, so that most steps hold decodes alone; left out: at once.

    Raises:
        ConfigError: A request could never run; none has been started then.
    """
    scheduler, runner = engine.scheduler, engine.runner
    choose = choose or (lambda prepared, hidden: runner.finish(prepared, hidden).wait())
    for request in requests:
        scheduler.check(request)
    try:
        return _run(engine, requests, as_eager, choose, refill_below)
    finally:
        scheduler.clear()  # a step that fails leaves none of them behind


def _run(
    engine: Engine,
    requests: Sequence[Request],
    as_eager: bool,
    choose: ChooseTokens,
    refill_below: int | None,
) -> dict[str, tuple[int, ...]]:
    scheduler, runner = engine.scheduler, engine.runner
    outputs: dict[str, tuple[int, ...]] = {}
    submitted = under_way = 0
    while True:
        if refill_below is None or under_way < max(refill_below, 1):
            room = len(requests) if refill_below is None else engine.table.max_num_seqs - under_way
            started = requests[submitted : submitted + room]
            for request in started:
                scheduler.submit(request)
            submitted, under_way = submitted + len(started), under_way + len(started)
        step = scheduler.schedule()
        if step is None and not runner.has_peers:
            return outputs
        # A rank without work takes part until all are idle: the experts' exchange needs everyone.
        step = step or IDLE_STEP
        decision = runner.decide(step)
        if decision.reason is DecisionReason.IDLE:
            return outputs
        if as_eager:
            decision = dataclasses.replace(decision, key=decision.key.as_eager())
        prepared = runner.prepare(step, decision)
        tokens = choose(prepared, runner.launch(prepared))
        for finished in scheduler.advance(step, tokens):
            outputs[finished.request.request_id] = tuple(finished.output)
            under_way -= 1
