"""What passes between the scheduler and the phases of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cgprof.batch.context import ForwardContext
from cgprof.graphs.manager import CapturedGraph
from cgprof.microbatch.spread import Region
from cgprof.shapes import BatchShape, StepDecision


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The requests that run and how many tokens each, decodes first."""

    rows: NDArray[np.int32]  # [r] rows of the RequestTable
    query_lens: NDArray[np.int32]  # [r]
    shape: BatchShape

    @property
    def one_each(self) -> bool:
        """Whether every request runs one token, so that token i is of request i."""
        return self.shape.max_query_len == 1


# What a rank without requests takes part with: padding alone.
IDLE_STEP = Step(
    rows=np.zeros(0, np.int32),
    query_lens=np.zeros(0, np.int32),
    shape=BatchShape(num_reqs=0, num_tokens=0, max_query_len=0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedStep:
    """A step whose inputs are in the buffers; valid until the next prepare."""

    step: Step
    decision: StepDecision
    graph: CapturedGraph | None  # what replays; None runs eager
    contexts: tuple[ForwardContext, ...]  # of an eager step: one, or one a microbatch
    token_slices: tuple[slice, ...]  # each context's rows of the output
    any_random: bool  # whether a request samples, and not all are greedy
    spread: tuple[Region, ...] = ()  # where its tokens lie; empty: in the first rows of the output
