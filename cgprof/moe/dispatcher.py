"""Sends tokens to the ranks of their experts and brings results back; one rank's version."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from cgprof.batch.context import Handoff
from cgprof.moe.kept_routing import KeptRouting

Lane = Literal["captured", "eager"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchHandle:
    """Goes from `dispatch` to `combine`. Rows are those that this rank's experts must run."""

    hidden: torch.Tensor  # [rows, D]
    expert_ids: torch.Tensor  # [rows, K] i32, local ids; -1 is not this rank's
    weights: torch.Tensor  # [rows, K] f32
    capacity: int  # tokens that one rank may send to another, fixed by the key


class TokenDispatcher(Protocol):
    """The expert exchange. Static shapes, no host sync, buffers of its own a microbatch.

    All ranks call it in the same order with the same T. `lane` says which of the two communicators
    carries its collectives; the engine sets it before a step, alike on all ranks. Once `kept` is
    complete collectives are left out, experts are told what it holds, and all else stays: for
    timing only.
    """

    lane: Lane
    kept: KeptRouting | None

    def dispatch(
        self,
        hidden: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        handoff: Handoff,
        meanwhile: Callable[[], None] | None = None,
    ) -> DispatchHandle:
        """Sends hidden [T, D], expert_ids [T, K] and weights [T, K] to the experts' ranks.

        Ids are those of the whole model; -1 is no expert, and a row of nothing else is padding:
        it is sent nowhere that counts, whatever its hidden values are.
        """

    def combine(
        self,
        handle: DispatchHandle,
        expert_out: torch.Tensor,
        handoff: Handoff,
        meanwhile: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Brings weighted sums expert_out [rows, D] home and returns [T, D]; padding gets zero."""

    def dropped_rows(self) -> int:
        """Returns how many rows found no room at a rank so far. Reads the device: diagnostics."""


class LocalDispatcher:
    """One rank: nothing to send. With `loopback`, both ways copy through the handoff all the same.

    The loopback stands in for the exchange on the communication stream, so that a microbatched
    step and a plain one differ in microbatching alone.
    """

    def __init__(self, *, loopback: bool) -> None:
        self.lane: Lane = "eager"
        self.kept: KeptRouting | None = None  # one rank exchanges nothing that could be left out
        self._loopback = loopback

    def dispatch(
        self,
        hidden: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        handoff: Handoff,
        meanwhile: Callable[[], None] | None = None,
    ) -> DispatchHandle:
        """Hands the tokens over as they are, or as copies made by the loopback."""
        sent = (hidden, expert_ids, weights)
        received = self._exchange(sent, handoff, meanwhile)
        return DispatchHandle(
            hidden=received[0],
            expert_ids=received[1],
            weights=received[2],
            capacity=hidden.shape[0],
        )

    def combine(
        self,
        handle: DispatchHandle,
        expert_out: torch.Tensor,
        handoff: Handoff,
        meanwhile: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Returns the sums as they are, or a copy made by the loopback."""
        return self._exchange((expert_out,), handoff, meanwhile)[0]

    def dropped_rows(self) -> int:
        """Returns 0."""
        return 0

    def _exchange(
        self,
        sent: tuple[torch.Tensor, ...],
        handoff: Handoff,
        meanwhile: Callable[[], None] | None,
    ) -> tuple[torch.Tensor, ...]:
        if not self._loopback:
            if meanwhile is not None:
                meanwhile()
            return sent
        received = tuple(torch.empty_like(tensor) for tensor in sent)

        def copy() -> None:
            for target, source in zip(received, sent, strict=True):
                target.copy_(source)

        handoff.communicate(copy, meanwhile)
        return received
