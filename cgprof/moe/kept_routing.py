"""Feeds the experts of a step without exchange what the same step's exchange brought them.

How many experts a layer runs decides how long it takes, and each layer has its own: a step that
left the exchange out would find the last layer's routing in the buffers, for all of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

import torch

from cgprof.batch.context import Handoff
from cgprof.errors import ReplayError

Routing = tuple[torch.Tensor, torch.Tensor]


class KeptRouting:
    """One step's expert ids and weights, in the order of each microbatch's layers.

    Until it is `complete`, steps exchange and theirs is kept; afterwards nothing travels, and each
    dispatch is given again what it got. For timing only. Recordings read the kept tensors.
    """

    def __init__(self) -> None:
        self.complete = False
        self._kept: dict[int, list[Routing]] = defaultdict(list)
        self._given: Counter[int] = Counter()

    def begin_pass(self) -> None:
        """The next dispatch of each microbatch is that of its first layer."""
        self._given.clear()
        if not self.complete:
            self._kept.clear()

    def routed(self, microbatch: int, routing: Routing) -> Routing:
        """Returns what the experts are told in place of `routing`: ids [rows, K], weights.

        Raises:
            ReplayError: The pass has more dispatches than the one that was kept, or other rows.
        """
        if not self.complete:
            self._kept[microbatch].append((routing[0].clone(), routing[1].clone()))
            return routing
        kept, index = self._kept[microbatch], self._given[microbatch]
        self._given[microbatch] += 1
        if index >= len(kept) or kept[index][0].shape != routing[0].shape:
            raise ReplayError(
                "step without exchange", f"no routing was kept for dispatch {index} of its kind"
            )
        return kept[index]


def transfer(kept: KeptRouting | None, op: Callable[[], None]) -> Callable[[], None] | None:
    """Returns the transfer of a step, None where nothing travels.

    An empty one would still fork and join the streams.
    """
    return op if kept is None or not kept.complete else None


def routed(kept: KeptRouting | None, handoff: Handoff, routing: Routing) -> Routing:
    """Returns what the experts of a dispatch are told, which came with `routing`."""
    return routing if kept is None else kept.routed(handoff.index, routing)
