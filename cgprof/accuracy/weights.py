"""Are the weights still those that the run was asked for? Neither parity nor greedy runs can see.

Both sides of those legs share the weights, so that this leg reads each tensor once more from its
checkpoint, or generates it once more from its seed, and compares bit by bit.
"""

from __future__ import annotations

import torch

from cgprof.engine.worker import Engine
from cgprof.models.checkpoint import reread_weights
from cgprof.record.scores import WeightsResult


def check_weights(engine: Engine) -> WeightsResult:
    """Compares every weight; call inside `active()`.

    Raises:
        ConfigError: The checkpoint is gone or damaged.
    """
    weights = dict(engine.model.named_weights())
    different, seen = [], set()
    for name, fresh in reread_weights(engine.model, engine.config.seed):
        seen.add(name)
        if not torch.equal(weights[name], fresh):
            different.append(name)
    missing = sorted(set(weights) - seen)
    return WeightsResult(
        passed=not different and not missing,
        source=engine.model_config.weights or f"seed {engine.config.seed}",
        tensors=len(seen),
        different=tuple(different),
        note=f"not read again: {', '.join(missing)}" if missing else "",
    )
