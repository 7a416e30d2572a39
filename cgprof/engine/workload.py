"""A short workload of many prompt lengths, for looking at how real steps are decided."""

from __future__ import annotations

import numpy as np

from cgprof.batch.request import Request
from cgprof.config.schema import ModelConfig, RunConfig


def workload(run: RunConfig, model: ModelConfig) -> list[Request]:
    """Returns a seeded mix of short and long prompts, as many as the engine holds at once."""
    rng = np.random.default_rng(run.seed)
    limits = run.limits
    longest = max(1, min(limits.max_model_len - 8, limits.max_num_batched_tokens))
    lengths = np.minimum(rng.geometric(1 / 96, limits.max_num_seqs), longest)
    lengths[0] = longest
    return [
        Request(
            request_id=str(index),
            prompt=tuple(rng.integers(0, model.vocab_size, int(length)).tolist()),
            max_new_tokens=int(min(4 + index % 8, limits.max_model_len - int(length))),
        )
        for index, length in enumerate(lengths)
    ]
