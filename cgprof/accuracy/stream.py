"""Many steps with different inputs and no wait between them, each checked afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from cgprof.accuracy.cases import Filling, ParityCase, fewest_requests
from cgprof.accuracy.parity import ParityChecker, case_step, greedy_tokens
from cgprof.accuracy.tally import Outcome, Tally
from cgprof.engine.live import spread
from cgprof.engine.types import Step
from cgprof.engine.worker import Engine
from cgprof.record.graph import ParityResult
from cgprof.shapes import GraphKey


def check_stream(
    engine: Engine, keys: Sequence[GraphKey], *, steps: int = 200, seed: int = 0
) -> ParityResult:
    """Replays steps of these keys in turn without a wait, then runs each eagerly and compares.

    Shows what a wait hides: inputs or outputs of one step overwritten by the next too early.
    """
    checker, tally = ParityChecker(engine), Tally("replay-eager")
    rng = np.random.default_rng(seed)
    taken: list[tuple[GraphKey, Step, torch.Tensor]] = []
    if keys:
        filling = checker.filling_for(keys[-1])
        whole = checker.fill(filling)
        for index in range(steps):
            key = keys[index % len(keys)]
            step = case_step(whole, random_case(key, filling, rng), key)
            prepared = engine.runner.prepare(step, engine.decision_for(key))
            hidden = engine.runner.launch(prepared, count=False)
            taken.append((key, step, hidden[: step.shape.num_tokens].clone()))
    tally.replays = len(taken)
    for key, step, hidden in taken:
        replay = Outcome(hidden=hidden, tokens=greedy_tokens(engine, hidden, step))
        tally.compare(replay, checker.run(key.as_eager(), step), str(key))
    return tally.result(tally.is_exact)


def random_case(key: GraphKey, filling: Filling, rng: np.random.Generator) -> ParityCase:
    """Returns a batch that the key admits: any number of requests, in any order."""
    available = len(filling.contexts)
    lens = tuple(spread(key.num_tokens, min(key.num_reqs or key.num_tokens, available)))
    fewest = fewest_requests(key, lens) if key.is_twin else 1
    count = int(rng.integers(fewest, len(lens), endpoint=True))
    indices = tuple(rng.permutation(available)[:count].tolist())
    return ParityCase(kind="random", indices=indices, query_lens=lens[:count])
