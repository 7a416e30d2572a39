"""Buffers of an exchange, one set a microbatch, at fixed addresses for the life of the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from cgprof.batch.context import Handoff
from cgprof.errors import ConfigError

_Buffers = TypeVar("_Buffers")


class MicrobatchBuffers(Generic[_Buffers]):
    """What `allocate` makes for the most tokens of each microbatch.

    A whole step takes the set of microbatch 0: it never runs beside a split one.
    """

    def __init__(
        self, max_tokens: int, num_microbatches: int, allocate: Callable[[int], _Buffers]
    ) -> None:
        # The last part of a split step takes what the division leaves over.
        part = min(max_tokens, max_tokens // num_microbatches + num_microbatches - 1)
        self._sizes = (max_tokens, *[part] * (num_microbatches - 1))
        self._sets = tuple(allocate(size) for size in self._sizes)

    def of(self, handoff: Handoff, num_tokens: int) -> _Buffers:
        """Returns the buffers of the handoff's microbatch.

        Raises:
            ConfigError: There are none for that microbatch, or they hold fewer tokens.
        """
        if handoff.index >= len(self._sizes):
            raise ConfigError(
                "expert exchange",
                f"has buffers for {len(self._sizes)} microbatches, not for index {handoff.index}",
            )
        most = self._sizes[handoff.index]
        if num_tokens > most:
            raise ConfigError(
                "expert exchange",
                f"{num_tokens} tokens of microbatch {handoff.index} do not fit buffers for {most}",
            )
        return self._sets[handoff.index]
