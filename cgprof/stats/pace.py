"""When a host ran slower beside one thing than beside others, by a fixed loop timed beside each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

_Thing = TypeVar("_Thing")

# Of the loop beside one thing, over that beside another: launches differ as well then.
MOST_SLOWER: Final = 1.25


def slower(paces_ns: Mapping[_Thing, int], fastest_ns: int) -> dict[_Thing, float]:
    """Returns by how much the host was slower than at its fastest, where that is too much."""
    ratios = {thing: pace_ns / fastest_ns for thing, pace_ns in paces_ns.items()}
    return {thing: ratio for thing, ratio in ratios.items() if ratio > MOST_SLOWER}
