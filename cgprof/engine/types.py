"""What passes between the scheduler and the phases of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cgprof.batch.context import ForwardContext
from cgprof.shapes import BatchShape, StepDecision


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The requests that run and how many tokens each, decodes first."""

    rows: NDArray[np.int32]  # [r] rows of the RequestTable
    query_lens: NDArray[np.int32]  # [r]
    shape: BatchShape


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """A step whose inputs are in the buffers; valid until the next prepare."""

    step: Step
    decision: StepDecision
    contexts: tuple[ForwardContext, ...]  # one, or one a microbatch
    token_slices: tuple[slice, ...]  # each context's rows of the output
    any_random: bool  # whether a request samples, and not all are greedy
