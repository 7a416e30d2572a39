"""Keeps the thread that launches on a CPU at full pace while launches are timed.

A core whose other half, or whose clock, a neighbour has taken runs at half its pace for seconds,
and everything that the host does reads twice as long. Which core that is changes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from cgprof.measure.clock import Clock
from cgprof.measure.pace import loop_ns

if TYPE_CHECKING:
    from cgprof.engine.worker import Engine

_LOOPS = 2  # on every CPU: 0.7 ms on a fast host
_NEAR: Final = 1.15  # of the best pace so far: good enough to stay


class HostCpu:
    """The CPU of the calling thread, chosen among `cpus`; with fewer than two it is left alone.

    Threads and processes that start meanwhile inherit the choice: `release` before others do.
    """

    def __init__(self, clock: Clock, cpus: Sequence[int]) -> None:
        self._clock = clock
        self._cpus = tuple(cpus)
        self._before: set[int] | None = None  # what `release` gives back
        self._best_ns: int | None = None

    def settle(self) -> None:
        """Moves to the CPU that is fastest now, unless the present one is near the best so far."""
        if len(self._cpus) < 2:
            return
        if self._best_ns is not None and self._pace_ns() <= _NEAR * self._best_ns:
            return
        if self._before is None:
            self._before = os.sched_getaffinity(0)
        paces = {}
        for cpu in self._cpus:
            os.sched_setaffinity(0, {cpu})
            paces[cpu] = self._pace_ns()
        fastest = min(paces, key=lambda cpu: paces[cpu])
        os.sched_setaffinity(0, {fastest})
        self._best_ns = min(paces[fastest], self._best_ns or paces[fastest])

    def release(self) -> None:
        """Gives the thread all of its CPUs back."""
        if self._before is not None:
            os.sched_setaffinity(0, self._before)
            self._before = None

    def _pace_ns(self) -> int:
        return min(loop_ns(self._clock) for _ in range(_LOOPS))


def host_cpu(engine: Engine, clock: Clock) -> HostCpu:
    """Returns the choice of an engine's thread; ranks choose among different CPUs.

    None is chosen without a device, whose host threads compute, and where `measure.pin_host` is
    off.
    """
    wanted = engine.device.type == "cuda" and engine.config.measure.pin_host
    if not wanted or not hasattr(os, "sched_getaffinity"):
        return HostCpu(clock, ())
    rank, size = (0, 1) if engine.ranks is None else (engine.ranks.rank, engine.ranks.size)
    return HostCpu(clock, sorted(os.sched_getaffinity(0))[rank::size])
