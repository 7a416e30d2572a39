"""How fast the host runs Python at a moment: a fixed loop, timed.

A host whose cores are shared or change their clock launches the same graph at two paces; without a
measure of its own that reads as a difference between graphs.
"""

from __future__ import annotations

from typing import Final

from cgprof.measure.clock import Clock

_ADDITIONS: Final = 10_000
_LOOPS = 5


def host_pace_ns(clock: Clock) -> int:
    """Returns the median time of a fixed loop of additions, about 0.3 ms on a fast host."""
    return sorted(loop_ns(clock, _ADDITIONS) for _ in range(_LOOPS))[_LOOPS // 2]


def loop_ns(clock: Clock, additions: int) -> int:
    """Returns the time of one loop of so many additions."""
    total, begun_ns = 0, clock.read_ns()
    for number in range(additions):
        total += number
    return clock.read_ns() - begun_ns
