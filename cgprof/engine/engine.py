"""The stepping loop: schedule, decide, prepare, launch, finish, wait, advance."""

from __future__ import annotations

from collections.abc import Sequence

from cgprof.batch.request import Request
from cgprof.engine.worker import Engine


def serve(engine: Engine, requests: Sequence[Request]) -> dict[str, tuple[int, ...]]:
    """Serves the requests with continuous batching and returns the tokens of each by its id.

    Call inside `engine.active()`, with no live requests in the table.
    """
    for request in requests:
        engine.scheduler.submit(request)
    outputs: dict[str, tuple[int, ...]] = {}
    runner = engine.runner
    while (step := engine.scheduler.schedule()) is not None:
        prepared = runner.prepare(step, runner.decide(step))
        tokens = runner.finish(prepared, runner.launch(prepared)).wait()
        for finished in engine.scheduler.advance(step, tokens):
            outputs[finished.request.request_id] = tuple(finished.output)
    return outputs
