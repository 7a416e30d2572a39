"""Which ranks kept a step from being split, and why. Pure: votes in, vetoes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cgprof.config.schema import MicrobatchConfig
from cgprof.graphs.dispatch import widest
from cgprof.microbatch.rule import wants_split
from cgprof.shapes import BatchShape, StepVote, VetoReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Veto:
    """One rank's part in a step that was not split though another rank wished it."""

    rank: int
    reason: VetoReason


def vetoes(votes: Sequence[StepVote], config: MicrobatchConfig) -> tuple[Veto, ...]:
    """Returns the vetoes of all ranks' votes, in rank order.

    There are none where no rank wishes to split, nor where the votes allow it. What happens
    afterwards is no veto: a twin that is missing, or a microbatch that would be empty.
    """
    if not any(vote.wants_microbatch for vote in votes):
        return ()
    unwilling = [rank for rank, vote in enumerate(votes) if not vote.wants_microbatch]
    if unwilling:
        return tuple(
            Veto(rank=rank, reason=_why_unwilling(votes[rank].shape, config)) for rank in unwilling
        )
    shapes = [vote.shape for vote in votes]
    fewest = min(shape.num_tokens for shape in shapes)
    uniform = widest(votes).uniform_query_len is not None
    if wants_split(fewest, uniform=uniform, config=config):
        return ()
    # All wish it by the threshold of their own batch, and together they fall under the other one.
    mixed = [rank for rank, shape in enumerate(shapes) if shape.uniform_query_len is None]
    small = [
        rank
        for rank, shape in enumerate(shapes)
        if not wants_split(shape.num_tokens, uniform=uniform, config=config)
    ]
    return tuple(Veto(rank=rank, reason=VetoReason.NOT_UNIFORM) for rank in mixed or small)


def _why_unwilling(shape: BatchShape, config: MicrobatchConfig) -> VetoReason:
    if not shape.num_tokens:
        return VetoReason.IDLE
    is_uniform = shape.uniform_query_len is not None
    if not is_uniform and wants_split(shape.num_tokens, uniform=True, config=config):
        return VetoReason.NOT_UNIFORM
    return VetoReason.BELOW_THRESHOLD
