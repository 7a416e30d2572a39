"""What goes from dispatch to combine where tokens travel in blocks, one a rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cgprof.moe.block_layout import BlockLayout
from cgprof.moe.dispatcher import DispatchHandle
from cgprof.moe.kept_routing import Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class SentBlocks(DispatchHandle):
    """A dispatch in blocks, and where this rank's own tokens lie in those of the others."""

    places: torch.Tensor  # [P, T] i32, each token's row in a rank's block, -1 for none
    layout: BlockLayout


def sent_blocks(
    received: torch.Tensor, routing: Routing, places: torch.Tensor, layout: BlockLayout
) -> SentBlocks:
    """Returns the handle of blocks that came [rows, D], with local ids and weights [rows, K]."""
    expert_ids, weights = routing
    return SentBlocks(
        hidden=received,
        expert_ids=expert_ids,
        weights=weights,
        capacity=layout.capacity,
        places=places,
        layout=layout,
    )
