"""Is a step what the token lists say, within what rounding alone explains?"""

from __future__ import annotations

import torch

from cgprof.accuracy.noise import allowance, distance, token_errors
from cgprof.engine.live import make_step
from cgprof.engine.types import Step
from cgprof.engine.worker import Engine
from cgprof.shapes import StepDecision


def run_step(engine: Engine, step: Step, decision: StepDecision) -> torch.Tensor:
    """Returns the hidden states of the step's real tokens [t, D], over an output full of NaN."""
    prepared = engine.runner.prepare(step, decision)
    engine.output.fill_(float("nan"))
    hidden = engine.runner.launch(prepared)
    engine.synchronize()
    return hidden[: step.shape.num_tokens].clone()


class References:
    """Fresh caches for the live requests: one run whole, and one run request by request."""

    def __init__(self, engine: Engine) -> None:
        budget = engine.config.limits.max_num_batched_tokens
        self._dtype = engine.dtype
        self._whole = engine.reference(chunk=budget)
        self._single = engine.reference(chunk=budget * 5 // 8)

    def check(self, step: Step, hidden: torch.Tensor) -> None:
        """Asserts that `hidden` is the step within the allowance over the measured floor."""
        wanted = self._whole.hidden(step)
        alone = [
            self._single.hidden(make_step(step.rows[i : i + 1], step.query_lens[i : i + 1]))
            for i in range(step.rows.size)
        ]
        floor = distance(token_errors(torch.cat(alone), wanted))
        found = distance(token_errors(hidden, wanted))
        assert found.within(allowance(floor, self._dtype)), (found, floor)
