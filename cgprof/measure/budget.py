"""Keeps captures within a budget of graph memory, by what they have taken so far. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from cgprof.shapes import GraphKey
from cgprof.units import format_bytes


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The most that all graphs of a rank may take.

    In capture order a twin is never captured after a plain key was refused: it is estimated to
    need more. So no refused twin lacks the plain key of its size.
    """

    limit_bytes: int

    def room_for(self, key: GraphKey, grown_bytes: int, next_estimate: int) -> str | None:
        """Returns why the key is left out, or None if it may be captured.

        Args:
            key: The next one.
            grown_bytes: What the graphs before it have taken, measured.
            next_estimate: What it is estimated to add.
        """
        if grown_bytes + next_estimate <= self.limit_bytes:
            return None
        return (
            f"left out to keep graph memory within {format_bytes(self.limit_bytes)}: "
            f"{format_bytes(grown_bytes)} measured before it, and {key} takes about "
            f"{format_bytes(next_estimate)} (estimate)"
        )
