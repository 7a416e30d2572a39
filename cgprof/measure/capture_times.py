"""Splits the time of a capture into its parts, the garbage collector's share apart."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

from cgprof.measure.accounting import INSTANTIATED, RECORDED, WARMED_UP
from cgprof.record.graph import CaptureTimes, GraphRecord

Part = Literal["warm_up", "record", "instantiate", "readings"]

# What a capture was doing when GraphManager says that it has just done it.
PART_BEFORE: Mapping[str, Part] = {
    WARMED_UP: "warm_up",
    RECORDED: "record",
    INSTANTIATED: "instantiate",
}
_ORDER: tuple[Part, ...] = ("warm_up", "record", "instantiate", "readings")


class CaptureWatch:
    """Gives the time since the last lap to a part, less what the garbage collector took of it."""

    def __init__(self, read_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._read_ns = read_ns
        self._last_ns = read_ns()
        self._parts: dict[Part, int] = dict.fromkeys(_ORDER, 0)
        self._marks = 0
        self._gc_start_ns: int | None = None
        self._gc_ns = 0
        self._gc_in_lap_ns = 0

    @property
    def under_way(self) -> Part:
        """The part that the capture is in, by the marks so far."""
        return _ORDER[self._marks]

    def mark(self, phase: str) -> None:
        """Ends the part of a phase that GraphManager has just finished."""
        self.lap(PART_BEFORE[phase])
        self._marks += 1

    def lap(self, part: Part) -> None:
        """Ends a lap."""
        now_ns = self._read_ns()
        self._parts[part] += max(0, now_ns - self._last_ns - self._gc_in_lap_ns)
        self._last_ns, self._gc_in_lap_ns = now_ns, 0

    def times(self) -> CaptureTimes:
        """Returns the parts of the laps so far."""
        return CaptureTimes(
            **{f"{part}_ns": ns for part, ns in self._parts.items()}, gc_ns=self._gc_ns
        )

    def collecting(self, phase: str, info: Mapping[str, int]) -> None:
        """Hears of each collection, as one of `gc.callbacks`."""
        if phase == "start":
            self._gc_start_ns = self._read_ns()
        elif self._gc_start_ns is not None:
            took_ns = self._read_ns() - self._gc_start_ns
            self._gc_ns += took_ns
            self._gc_in_lap_ns += took_ns
            self._gc_start_ns = None


@contextmanager
def watched_capture() -> Iterator[CaptureWatch]:
    """Watches one capture and its memory readings."""
    watch = CaptureWatch()
    gc.callbacks.append(watch.collecting)
    try:
        yield watch
    finally:
        gc.callbacks.remove(watch.collecting)


def seconds_by_part(times: Sequence[CaptureTimes]) -> dict[str, float]:
    """Returns the seconds of each part over all captures, under the names that people read."""
    return {
        "warm-up": sum(one.warm_up_ns for one in times) / 1e9,
        "record": sum(one.record_ns for one in times) / 1e9,
        "instantiate": sum(one.instantiate_ns for one in times) / 1e9,
        "garbage collection": sum(one.gc_ns for one in times) / 1e9,
        "memory readings": sum(one.readings_ns for one in times) / 1e9,
    }


def seconds_by_kind(graphs: Sequence[GraphRecord]) -> dict[str, float]:
    """Returns the seconds of capturing and instantiating, readings left out, by kind of key."""
    nanoseconds = {"plain keys": 0, "twins": 0}
    for graph in graphs:
        taken_ns = (graph.capture_ns or 0) + (graph.instantiate_ns or 0)
        nanoseconds["twins" if graph.key.is_twin else "plain keys"] += taken_ns
    return {f"capture of {kind}": taken_ns / 1e9 for kind, taken_ns in nanoseconds.items()}


def describe_parts(parts: Mapping[str, float]) -> str:
    """Returns the whole and its shares, the largest first."""
    whole = sum(parts.values())
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    shares = ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in ordered if seconds)
    return f"captures took {whole:.1f} s" + (f": {shares}" if shares else "")
