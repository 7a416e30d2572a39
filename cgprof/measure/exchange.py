"""What a step of a key sends to other ranks: the bytes that move, and those that had to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cgprof.moe.backends import row_format
from cgprof.moe.traffic import bytes_moved, bytes_needed
from cgprof.parallel.ep import expert_starts
from cgprof.shapes import GraphKey

if TYPE_CHECKING:
    from cgprof.engine.types import Step
    from cgprof.engine.worker import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Of one step of one rank, all layers, both ways. None: no other rank, or sizes by routing."""

    moved_bytes: int | None = None
    needed_bytes: int | None = None


def exchange_traffic(engine: Engine, key: GraphKey, step: Step) -> Traffic:
    """Returns the traffic of a step of this key: moved by its shapes, needed by its routing.

    A diagnostic, which runs the model for the routing.
    """
    ranks = engine.ranks
    if ranks is None or ranks.size == 1 or not engine.model_config.is_moe:
        return Traffic()
    model, parallel, row = (
        engine.model_config,
        engine.config.parallel,
        row_format(engine.model_config, engine.dtype),
    )
    routings = engine.routings(step).tolist()
    starts = expert_starts(model.num_experts, ranks.size)
    backend, capacity = parallel.all2all_backend, parallel.dispatch_capacity
    moved = [
        bytes_moved(backend, tokens, ranks.size, row, capacity) for tokens in microbatch_tokens(key)
    ]
    known = [part for part in moved if part is not None]
    return Traffic(
        moved_bytes=len(routings) * sum(known) if known else None,
        needed_bytes=sum(bytes_needed(ids, ranks.rank, starts, row) for ids in routings),
    )


def microbatch_tokens(key: GraphKey) -> list[int]:
    """Returns the padded tokens of each microbatch of a key; the last takes what is left over."""
    width = key.num_tokens // key.num_microbatches
    return [width] * (key.num_microbatches - 1) + [
        key.num_tokens - width * (key.num_microbatches - 1)
    ]
