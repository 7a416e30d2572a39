"""Says what a run is doing, how far it is and how long the rest may take; never silent for long.

The only thing that runs beside a measurement: a thread that wakes when nothing was said for a
while, a few times a minute at most.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_EVERY_S = 4.5
_SHORTEST_ETA_S = 1.0


class Progress:
    """A context manager; `say` prints a line. Its thread lives as long as the context."""

    def __init__(
        self,
        say: Callable[[str], None],
        *,
        every_s: float = _EVERY_S,
        read_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._every_s = every_s
        self._read_s = read_s
        self._changed = threading.Condition()
        self._stopped = False
        self._line = ""
        self._eta = ""
        self._begun_s = self._said_s = read_s()
        self._name, self._count, self._index, self._stage_s = "", 0, 0, 0.0
        self._thread = threading.Thread(target=self._remind, name="progress", daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def say(self, line: str) -> None:
        """Says what begins now, of unknown length."""
        self._begin(line, "")

    def stage(self, name: str, count: int) -> None:
        """Begins a stage of `count` steps."""
        self._name, self._count, self._index = name, count, 0
        self._stage_s = self._read_s()

    def step(self, label: str) -> None:
        """Says which step of the stage begins now, and about how long the rest takes."""
        eta = eta_text(self._index, self._count, self._read_s() - self._stage_s)
        self._index += 1
        self._begin(f"{self._name} {self._index}/{self._count} {label}", eta)

    def _begin(self, line: str, eta: str) -> None:
        with self._changed:
            self._line, self._eta = line, eta
            self._begun_s = self._said_s = self._read_s()
            self._say(line + eta)

    def _remind(self) -> None:
        with self._changed:
            while not self._stopped:
                left_s = self._said_s + self._every_s - self._read_s()
                if left_s > 0 or not self._line:
                    self._changed.wait(max(left_s, 0) or self._every_s)
                    continue
                self._said_s = self._read_s()
                so_far = f", {self._said_s - self._begun_s:.0f} s so far"
                try:
                    self._say(f"{self._line}{so_far}{self._eta}")
                except (OSError, ValueError):
                    return  # the reader went away; the run's own next line says so


def eta_text(done: int, count: int, elapsed_s: float) -> str:
    """Returns about how long the rest of a stage takes, if that is known and worth a word."""
    left_s = elapsed_s / done * (count - done) if done else 0.0
    return f", about {left_s:.0f} s left" if left_s >= _SHORTEST_ETA_S else ""
