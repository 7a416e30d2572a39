"""Host time, and device time by events. The engine's compute stream must be current throughout."""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np
import torch

from cgprof.stats.quantiles import median

_FLOOR_READS = 1001


class Span(Protocol):
    """A stretch of the device's work, used again and again."""

    def begin(self) -> None:
        """Marks on the device where it begins; enqueues only."""

    def end(self) -> None:
        """Marks on the device where it ends; enqueues only."""

    def ns(self) -> int | None:
        """Returns its device time, after waiting for its end; None without a device.

        A span on an idle device begins at once, hence holds the host's part up to the first kernel.
        """


class Clock(Protocol):
    """Reads host time, and makes spans of device time."""

    def read_ns(self) -> int:
        """Returns monotone host time."""

    def new_span(self) -> Span:
        """Returns a span on the stream that is current now."""

    def synchronize(self) -> None:
        """Waits for all work on the device."""


class _NoSpan:
    """Costs nothing and has no time."""

    def begin(self) -> None:
        """Does nothing."""

    def end(self) -> None:
        """Does nothing."""

    def ns(self) -> int | None:
        """Returns None: there is no device."""
        return None


class CpuClock:
    """The clock of a run without a device."""

    def read_ns(self) -> int:
        """Returns monotone host time."""
        return time.perf_counter_ns()

    def new_span(self) -> Span:
        """Returns a span without a time."""
        return _NoSpan()

    def synchronize(self) -> None:
        """Does nothing: operators on the CPU are done when they return."""


class _CudaSpan:
    """A pair of CUDA events, recorded on one stream: to look it up takes as long as to record."""

    def __init__(self) -> None:
        self._stream = torch.cuda.current_stream()
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def begin(self) -> None:
        """Records the first event."""
        self._begin.record(self._stream)

    def end(self) -> None:
        """Records the second event."""
        self._end.record(self._stream)

    def ns(self) -> int | None:
        """Waits for the second event and returns the time between both."""
        self._end.synchronize()
        elapsed_ms: float = self._begin.elapsed_time(self._end)
        return round(elapsed_ms * 1e6)


class CudaClock:
    """Host time, and spans between CUDA events."""

    def read_ns(self) -> int:
        """Returns monotone host time."""
        return time.perf_counter_ns()

    def new_span(self) -> Span:
        """Returns a pair of events."""
        return _CudaSpan()

    def synchronize(self) -> None:
        """Waits for all work on the current device."""
        torch.cuda.synchronize()


def clock_for(device: torch.device) -> Clock:
    """Returns the clock of a device's runs."""
    return CudaClock() if device.type == "cuda" else CpuClock()


def timer_floor_ns(clock: Clock) -> int:
    """Returns the median distance of two reads with nothing between them."""
    reads = np.array([clock.read_ns() for _ in range(_FLOOR_READS)], np.int64)
    return median(np.diff(reads))
