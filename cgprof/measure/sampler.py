"""Reads memory again and again from a thread of its own, for peaks between two readings.

Whatever is timed meanwhile is disturbed, hence labelled; by default nothing is sampled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from cgprof.measure.memory import used_bytes

if TYPE_CHECKING:
    from cgprof.engine.worker import Engine


class Peak:
    """The largest reading, and how many there were."""

    def __init__(self) -> None:
        self.count = 0
        self.most_bytes: int | None = None

    def add(self, num_bytes: int) -> None:
        """Takes one reading."""
        self.count += 1
        self.most_bytes = max(num_bytes, self.most_bytes or 0)


@contextmanager
def sampling(read: Callable[[], int], period_ms: float | None) -> Iterator[Peak]:
    """Calls `read` every `period_ms` until the block ends, at least once; None never calls it.

    An error of `read` ends the sampling and is raised when the block has ended.
    """
    peak = Peak()
    if period_ms is None:
        yield peak
        return
    stop, failures = threading.Event(), list[Exception]()
    thread = threading.Thread(
        target=_sample, args=(read, period_ms / 1e3, stop, peak, failures), name="memory sampler"
    )
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
    if failures:
        raise failures[0]


def _sample(
    read: Callable[[], int],
    period_s: float,
    stop: threading.Event,
    peak: Peak,
    failures: list[Exception],
) -> None:
    try:
        peak.add(read())
        while not stop.wait(period_s):
            peak.add(read())
    except (OSError, RuntimeError, ValueError) as error:
        failures.append(error)


def sampled(engine: Engine) -> AbstractContextManager[Peak]:
    """Samples the memory in use while a block runs, where the run asks for it."""
    return sampling(lambda: used_bytes(engine.device), engine.config.measure.memory_sample_ms)
