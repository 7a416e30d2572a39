"""Host time, and device time by events. The engine's compute stream must be current throughout."""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np
import torch

from cgprof.stats.quantiles import median

_FLOOR_READS = 1001


class Clock(Protocol):
    """Reads host time, and the device time of one span after another."""

    def read_ns(self) -> int:
        """Returns monotone host time."""

    def begin_span(self) -> None:
        """Marks on the device where a span begins; enqueues only."""

    def end_span(self) -> None:
        """Marks on the device where the span ends; enqueues only."""

    def span_ns(self) -> int | None:
        """Returns the last span's device time, after waiting for its end; None without a device.

        A span on an idle device begins at once, hence holds the host's part up to the first kernel.
        """

    def synchronize(self) -> None:
        """Waits for all work on the device."""


class CpuClock:
    """The clock of a run without a device: spans cost nothing and have no time."""

    def read_ns(self) -> int:
        """Returns monotone host time."""
        return time.perf_counter_ns()

    def begin_span(self) -> None:
        """Does nothing."""

    def end_span(self) -> None:
        """Does nothing."""

    def span_ns(self) -> int | None:
        """Returns None: there is no device."""
        return None

    def synchronize(self) -> None:
        """Does nothing: operators on the CPU are done when they return."""


class CudaClock:
    """Host time and one pair of CUDA events, recorded on the stream that is current."""

    def __init__(self) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def read_ns(self) -> int:
        """Returns monotone host time."""
        return time.perf_counter_ns()

    def begin_span(self) -> None:
        """Records the first event."""
        self._begin.record()

    def end_span(self) -> None:
        """Records the second event."""
        self._end.record()

    def span_ns(self) -> int | None:
        """Waits for the second event and returns the time between both."""
        self._end.synchronize()
        elapsed_ms: float = self._begin.elapsed_time(self._end)
        return round(elapsed_ms * 1e6)

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
