"""Lets exactly one of n threads run, in ring order; a thread that fails frees the rest.

Each microbatch sleeps on a lock of its own, so that a handover wakes one thread and costs a few
microseconds. A turn that lasts longer than the timeout ends the step and loses its thread.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from cgprof.errors import MicrobatchError


class PeerFailed(BaseException):
    """Unwinds a microbatch whose step failed elsewhere; never leaves the microbatch's thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The first error of a step and the microbatch that it names."""

    index: int
    error: BaseException


class Baton:
    """One step after another: `start`, turns, `join`. Microbatch 0 runs first.

    The microbatch threads call `wait_turn`, `check`, `hand_over`, `finish` and `fail`, each for
    itself; one owner thread calls the others.
    """

    def __init__(self, num_microbatches: int, timeout_s: float) -> None:
        self._count = num_microbatches
        self._timeout_s = timeout_s
        self._mutex = threading.Lock()
        self._turns = [_taken_lock() for _ in range(num_microbatches)]
        self._done = _taken_lock()
        self._unfinished = [False] * num_microbatches
        self._holder = 0
        self._moves = 0
        self._failure: Failure | None = None
        self._running = False
        self._lost: int | None = None
        self._stopped = False

    @property
    def running(self) -> bool:
        """Whether a step was started and not yet joined."""
        return self._running

    @property
    def lost(self) -> int | None:
        """The microbatch whose turn ran out of time; no other step can start then."""
        return self._lost

    def start(self) -> None:
        """Begins a step: gives microbatch 0 the turn."""
        with self._mutex:
            self._running = True
            self._failure = None
            self._unfinished = [True] * self._count
            self._holder = 0
            self._moves += 1
        self._turns[0].release()

    def join(self) -> Failure | None:
        """Waits until all microbatches have finished, or one is lost; returns the first error."""
        self._wait(self._done)
        self._running = False
        failure = self._failure
        if self._lost is None:
            self._failure = None
        return failure

    def cancel(self) -> None:
        """Fails the running step, if any; its microbatches unwind at their next handover."""
        with self._mutex:
            if self._running:
                error = MicrobatchError(self._holder, "the step was aborted")
                self._record(self._holder, error)

    def stop(self) -> None:
        """Ends the waits for a first turn for good: `wait_turn` returns False from now on."""
        with self._mutex:
            self._stopped = True
            for turn in self._turns:
                if turn.locked():
                    turn.release()

    def wait_turn(self, index: int) -> bool:
        """Waits for the microbatch's first turn in the next step; False when there is none.

        A thread rests here between steps. The wait inside a step is bounded by `join`.
        """
        if not self._stopped:
            self._turns[index].acquire()
        return not self._stopped

    def hand_over(self, index: int) -> None:
        """Gives the turn to the next unfinished microbatch and waits until it comes back.

        Raises:
            PeerFailed: The step has failed, or a peer kept its turn for longer than the timeout.
        """
        with self._mutex:
            self.check()
            peer = self._pass_on(index)
        if peer is not None:
            self._turns[peer].release()
            self._wait(self._turns[index])
            self.check()

    def check(self) -> None:
        """Raises PeerFailed when the step has failed."""
        if self._failure is not None:
            raise PeerFailed

    def finish(self, index: int) -> None:
        """Ends the microbatch's part; the ring goes on without it."""
        with self._mutex:
            self._unfinished[index] = False
            if self._lost is not None:
                return
            peer = self._pass_on(index)
        (self._done if peer is None else self._turns[peer]).release()

    def fail(self, index: int, error: BaseException) -> None:
        """Ends the microbatch's part with an error; the step's first error is kept.

        Peers unwind one after another, each in its own turn.
        """
        with self._mutex:
            self._record(index, error)
        self.finish(index)

    def _record(self, index: int, error: BaseException) -> None:
        if self._failure is None:
            self._failure = Failure(index=index, error=error)

    def _pass_on(self, index: int) -> int | None:
        """Makes the next unfinished peer the holder and returns it, for the caller to wake."""
        self._moves += 1
        for step in range(1, self._count):
            peer = (index + step) % self._count
            if self._unfinished[peer]:
                self._holder = peer
                return peer
        return None

    def _wait(self, lock: threading.Lock) -> None:
        """Waits for a lock as long as the turn moves on; else the holder of the turn is lost."""
        seen = self._moves
        while not lock.acquire(timeout=self._timeout_s):
            with self._mutex:
                # The lock may have been given between the timeout and this line.
                if lock.acquire(blocking=False):
                    return
                if self._moves == seen:
                    self._lose_holder(lock)
                    return
                seen = self._moves

    def _lose_holder(self, waiter: threading.Lock) -> None:
        problem = (
            f"kept its turn for more than {self._timeout_s:g} s (microbatch.timeout_s); "
            "it hangs, or the timeout is too short for this step"
        )
        self._record(self._holder, MicrobatchError(self._holder, problem))
        self._lost = self._holder
        peers = (i for i, left in enumerate(self._unfinished) if left and i != self._holder)
        for lock in (*(self._turns[peer] for peer in peers), self._done):
            if lock is not waiter:
                lock.release()


def _taken_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock
