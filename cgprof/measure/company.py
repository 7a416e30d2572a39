"""What one rank's job has to do with the other ranks, and how their steps were decided.

Alone, a rank agrees with itself: nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cgprof.errors import RankError
from cgprof.parallel.agree import agree_success
from cgprof.record.graph import GraphRecord
from cgprof.record.types import DecisionCount, RankRecord
from cgprof.record.votes import VetoCount
from cgprof.shapes import RuntimeMode

if TYPE_CHECKING:
    from cgprof.batch.request import Request
    from cgprof.engine.worker import Engine


def agreed(engine: Engine, graph: GraphRecord) -> GraphRecord:
    """Returns the record of a key that all ranks captured, or of one that is dropped on all.

    Only what all ranks captured can be replayed.
    """
    if engine.ranks is None:
        return graph
    problems = agree_success(engine.ranks, graph.failure, what=graph.label)
    if not problems or graph.failure is not None:
        return graph
    engine.graphs.drop(graph.key)
    told = "; ".join(f"rank {rank}: {problem}" for rank, problem in problems.items())
    return GraphRecord(
        key=graph.key,
        label=graph.label,
        requested_mode=graph.requested_mode,
        effective_mode=RuntimeMode.NONE.name,
        failure=f"dropped, since another rank could not capture it: {told}",
    )


def required(engine: Engine, graph: GraphRecord) -> GraphRecord:
    """Returns the record of a key that ran in steps of all ranks.

    Raises:
        RankError: It failed here, and the others wait for this rank.
    """
    ranks = engine.ranks
    if ranks is not None and graph.failure is not None:
        if "gloo" in graph.failure:  # a split step words the collective's error as its own
            raise ranks.lost(RuntimeError(graph.failure))
        raise RankError(ranks.rank, graph.failure)
    return graph


def own_part(engine: Engine, requests: Sequence[Request]) -> Sequence[Request]:
    """Returns unlike loads: rank 0 serves all requests, each further rank fewer of them."""
    ranks = engine.ranks
    if ranks is None:
        return requests
    return requests[: len(requests) * (ranks.size - ranks.rank) // ranks.size]


def gathered(engine: Engine, own: RankRecord) -> tuple[RankRecord, ...]:
    """Returns the records of the other ranks; every rank calls it at the same place."""
    ranks = engine.ranks
    if ranks is None:
        return ()
    sent = ranks.gather_objects(own.model_dump_json())
    found = [RankRecord.model_validate_json(str(text)) for text in sent]
    return tuple(record for record in found if record.rank != ranks.rank)


def decisions(engine: Engine) -> tuple[DecisionCount, ...]:
    """Returns how often a step ran as each key, and why."""
    return tuple(
        DecisionCount(
            label=str(key),
            reason=reason,
            count=count,
            eager_split=key.mode is RuntimeMode.NONE and key.num_microbatches > 1,
        )
        for (key, reason), count in sorted(
            engine.runner.decisions.items(), key=lambda item: str(item[0][0])
        )
    )


def vetoes(engine: Engine) -> tuple[VetoCount, ...]:
    """Returns which ranks refused to split, how often and why; equal on all."""
    counts = sorted(engine.runner.vetoes.items(), key=lambda item: (item[0].rank, item[0].reason))
    return tuple(
        VetoCount(rank=veto.rank, reason=veto.reason, count=count) for veto, count in counts
    )
