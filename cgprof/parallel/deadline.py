"""Ends a process whose device or peers do not answer, from a thread beside the blocked one."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cgprof.errors import RankError
from cgprof.parallel.failure import report_error

_MOST_LOOK_S = 0.05
_LOOKS_A_TIMEOUT = 10
_STDERR = 2
_ASKING_S = 6.0


@dataclass(slots=True, eq=False)
class _Watched:
    done: Callable[[], bool]
    what: str
    since: float


@dataclass(slots=True)
class _Section:
    what: str
    seconds: float
    until: float


class Deadline:
    """Watches that what was launched is done in time, or that a longer section ends.

    The thread looks some 20 times a second and is never woken, so that a watch costs the launching
    thread one store. It works while that thread is blocked in C code that let go of the GIL.
    """

    def __init__(self, timeout_s: float, on_expiry: Callable[[str], None]) -> None:
        """Starts the thread.

        Args:
            timeout_s: How long a watched launch may take.
            on_expiry: Called once on the thread, with what was not done and the time it had.
        """
        self._timeout_s = timeout_s
        self._on_expiry = on_expiry
        self._watched: _Watched | None = None
        self._seen_done: _Watched | None = None
        self._sections: list[_Section] = []
        self._lock = threading.Lock()  # held while `done` is asked and while sections change
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="deadline", daemon=True)
        self._thread.start()

    def watch(self, done: Callable[[], bool], what: str) -> None:
        """Gives what was just launched the timeout from now; takes the place of the watch before.

        Args:
            done: An event's query; asked on the thread, never inside `extended`. Where it raises a
                RuntimeError, the launching thread is about to get that error too.
            what: What does not finish, and what was decided last.
        """
        self._watched = _Watched(done, what, time.monotonic())

    def renew(self) -> None:
        """Gives the present watch its whole time again: a step has finished."""
        watched = self._watched
        if watched is not None:
            self._watched = _Watched(watched.done, watched.what, time.monotonic())

    @contextmanager
    def extended(self, seconds: float, what: str = "compile and warm-up") -> Iterator[None]:
        """Bounds the block by a time of its own; inside, nothing asks the device.

        A capture needs that: a query from another thread may spoil it. Outer sections and the
        present watch stand still meanwhile.
        """
        entered = time.monotonic()
        section = _Section(what, seconds, entered + seconds)
        with self._lock:
            self._sections.append(section)
        try:
            yield
        finally:
            with self._lock:
                self._sections.remove(section)
                if self._sections:
                    self._sections[-1].until += time.monotonic() - entered
            self.renew()

    def close(self) -> None:
        """Ends the thread; nothing expires after it."""
        self._closed.set()
        self._thread.join()

    def _look(self) -> None:
        pause = min(_MOST_LOOK_S, self._timeout_s / _LOOKS_A_TIMEOUT)
        while not self._closed.wait(pause):
            with self._lock:
                expired = self._expired()
            if expired is not None:
                self._on_expiry(expired)
                return

    def _expired(self) -> str | None:
        now = time.monotonic()
        if self._sections:
            section = self._sections[-1]
            return _waited(section.what, section.seconds) if now > section.until else None
        watched = self._watched
        if watched is None or watched is self._seen_done:
            return None
        try:
            done = watched.done()
        except RuntimeError:
            done = True
        if done:
            self._seen_done = watched
            return None
        late = now - watched.since > self._timeout_s
        return _waited(watched.what, self._timeout_s) if late else None


def end_rank(rank: int, stuck: Callable[[str], RankError]) -> Callable[[str], None]:
    """Returns what a rank does on expiry: it tells its launcher, or stderr, and ends.

    `stuck` finds out who is to blame. It may take as long as ranks need to hear of each other; one
    that takes much longer asks a rank that does not answer either.
    """

    def end(what: str) -> None:
        found = [RankError(rank, what)]
        asking = threading.Thread(target=lambda: found.insert(0, stuck(what)), daemon=True)
        asking.start()
        asking.join(_ASKING_S)
        error = found[0]
        if not report_error(error):
            os.write(_STDERR, f"error: {error}\n".encode())
        os._exit(error.exit_code)

    return end


def _waited(what: str, seconds: float) -> str:
    return f"{what} (waited {seconds:g} s)"
