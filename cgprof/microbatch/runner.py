"""Runs a step's microbatches on long-lived threads that take turns: park, then release or abort.

All microbatches compute on one stream and transfer on one other. Parking happens outside a graph
and enqueues nothing; releasing happens inside and returns when every thread has submitted its part.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal

import torch

from cgprof.batch.context import Handoff
from cgprof.errors import CgprofError, MicrobatchError
from cgprof.microbatch.baton import Baton, PeerFailed

Work = Callable[[], None]
Enter = Callable[[int], AbstractContextManager[None]]


class StreamHandoff:
    """The handoff of a step that is not split, when transfers have a stream of their own."""

    index: Final = 0

    def __init__(self, compute_stream: torch.cuda.Stream, comm_stream: torch.cuda.Stream) -> None:
        self._fork = _Fork(compute_stream, comm_stream)

    def communicate(self, op: Work | None, meanwhile: Work | None = None) -> None:
        """Transfers on the communication stream, runs `meanwhile`, then makes compute wait."""
        with ExitStack() as on_failure:
            on_failure.callback(self._fork.settle)
            if op is not None:
                self._fork.send(op)
            if meanwhile is not None:
                meanwhile()
            on_failure.pop_all()
        if op is not None:
            self._fork.join()


class MicrobatchRunner:
    """One thread a microbatch, alive until `close`; after a failed step it is ready for the next.

    On a CPU both streams are None. A microbatch that hangs makes the runner unusable.
    """

    def __init__(
        self,
        num_microbatches: int,
        *,
        compute_stream: torch.cuda.Stream | None,
        comm_stream: torch.cuda.Stream | None,
        timeout_s: float,
    ) -> None:
        self._compute_stream = compute_stream
        self._baton = Baton(num_microbatches, timeout_s)
        self._timeout_s = timeout_s
        self._parked: _Parked | None = None
        self._closed = False
        self._forks: list[_Fork | None] = [None] * num_microbatches
        if compute_stream is not None and comm_stream is not None:
            self._forks = [_Fork(compute_stream, comm_stream) for _ in range(num_microbatches)]
        self._handoffs = [
            _MicrobatchHandoff(index, self._baton, fork) for index, fork in enumerate(self._forks)
        ]
        self._threads = [
            threading.Thread(target=self._serve, args=(i,), name=f"microbatch-{i}", daemon=True)
            for i in range(num_microbatches)
        ]
        for thread in self._threads:
            thread.start()
        self._run_on_all(self._settle_on_stream)

    def handoff(self, index: int) -> Handoff:
        """The handoff of microbatch `index`; the same object for the life of the runner."""
        return self._handoffs[index]

    def warm_threads(self, dtype: torch.dtype) -> None:
        """Gives each thread its matmul library handle and workspace; call outside a capture.

        Both belong to a pair of thread and stream, and cannot be made while a stream is captured.

        Raises:
            MicrobatchError: The matmul failed.
        """
        stream = self._compute_stream
        if stream is None:
            return
        ones = torch.ones(16, 16, dtype=dtype, device=stream.device)
        stream.wait_stream(torch.cuda.current_stream(stream.device))

        def multiply() -> None:
            torch.mm(ones, ones)

        self._run_on_all(multiply)
        stream.synchronize()

    def park(self, works: Sequence[Work], enter: Enter) -> None:
        """Hands over a step, one work a microbatch; call outside a graph.

        Each thread runs its work inside `enter(index)`, entered on its first turn.

        Raises:
            MicrobatchError: A step is parked already, or the runner is closed or unusable.
        """
        if self._baton.lost is not None:
            raise MicrobatchError(
                self._baton.lost,
                "hung in an earlier step, so its runner takes no other; start a new run",
            )
        if self._closed:
            raise MicrobatchError(0, "its runner is closed")
        if self._parked is not None:
            raise MicrobatchError(0, "a step is parked already; release or abort it first")
        if len(works) != len(self._threads):
            raise MicrobatchError(
                len(works), f"got {len(works)} works for {len(self._threads)} microbatches"
            )
        self._parked = _Parked(works=tuple(works), enter=enter)

    def release(self) -> None:
        """Lets the parked step run and waits until all its microbatches have submitted their part.

        Raises:
            MicrobatchError: Nothing is parked, or a microbatch raised or hung: the first one,
                with its exception as the cause.
        """
        if self._parked is None:
            raise MicrobatchError(0, "nothing is parked; call park first")
        self._baton.start()
        failure = self._baton.join()
        self._parked = None
        if failure is None:
            return
        self._settle_forks()
        if isinstance(failure.error, MicrobatchError):
            raise failure.error
        is_ours = isinstance(failure.error, CgprofError)
        problem = (
            f"{failure.error}" if is_ours else f"{type(failure.error).__name__}: {failure.error}"
        )
        raise MicrobatchError(failure.index, problem) from failure.error

    def abort(self) -> None:
        """Drops the parked step, and unwinds one that is running. Nothing is pending afterwards."""
        if self._baton.running:
            self._baton.cancel()
            self._baton.join()
            self._settle_forks()
        self._parked = None

    def close(self) -> None:
        """Aborts, ends the threads and waits for them; one that hangs ends with the process."""
        self.abort()
        if self._closed:
            return
        self._closed = True
        self._baton.stop()
        for index, thread in enumerate(self._threads):
            if index != self._baton.lost:
                thread.join(self._timeout_s)

    def _run_on_all(self, work: Work) -> None:
        self.park([work] * len(self._threads), lambda _: nullcontext())
        self.release()

    def _settle_on_stream(self) -> None:
        if self._compute_stream is not None:
            torch.cuda.set_device(self._compute_stream.device)
            torch.cuda.set_stream(self._compute_stream)

    def _serve(self, index: int) -> None:
        with torch.inference_mode():
            while self._baton.wait_turn(index):
                with _Door(self._baton, index):
                    self._run(index)

    def _run(self, index: int) -> None:
        self._baton.check()
        assert self._parked is not None
        with self._parked.enter(index):
            self._parked.works[index]()

    def _settle_forks(self) -> None:
        for fork in self._forks:
            if fork is not None:
                fork.settle()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parked:
    works: tuple[Work, ...]
    enter: Enter


class _MicrobatchHandoff:
    """Lets the peers compute while this microbatch's transfer is under way."""

    def __init__(self, index: int, baton: Baton, fork: _Fork | None) -> None:
        self.index: Final = index
        self._baton = baton
        self._fork = fork

    def communicate(self, op: Work | None, meanwhile: Work | None = None) -> None:
        """Issues the transfer, runs `meanwhile`, hands the turn over, then makes compute wait."""
        if op is not None and self._fork is not None:
            self._fork.send(op)
        elif op is not None:
            op()
        if meanwhile is not None:
            meanwhile()
        self._baton.hand_over(self.index)
        if op is not None and self._fork is not None:
            self._fork.join()


class _Fork:
    """Branches off to the communication stream and back. One transfer at a time.

    The two events serve every transfer: a wait refers to the record before it, in a graph too.
    """

    def __init__(self, compute_stream: torch.cuda.Stream, comm_stream: torch.cuda.Stream) -> None:
        self._compute_stream = compute_stream
        self._comm_stream = comm_stream
        self._ready = torch.cuda.Event()
        self._arrived = torch.cuda.Event()
        self._open = False

    def send(self, op: Work) -> None:
        """Runs `op` with the communication stream current, after what compute has enqueued."""
        self._ready.record(self._compute_stream)
        with torch.cuda.stream(self._comm_stream):
            self._open = True
            self._comm_stream.wait_event(self._ready)
            op()
            self._arrived.record(self._comm_stream)

    def join(self) -> None:
        """Makes the compute stream wait for the transfer."""
        self._compute_stream.wait_event(self._arrived)
        self._open = False

    def settle(self) -> None:
        """After a failure: joins a transfer that was left open, since its buffers are free by now.

        In a capture that the failure made invalid this fails too; the first error is what counts.
        """
        if self._open:
            with suppress(RuntimeError):
                self._arrived.record(self._comm_stream)
                self.join()
            self._open = False


class _Door:
    """The end of a microbatch's part: whatever it raised goes to the baton, never up the thread."""

    def __init__(self, baton: Baton, index: int) -> None:
        self._baton = baton
        self._index = index

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Literal[True]:
        if error is None or isinstance(error, PeerFailed):
            self._baton.finish(self._index)
        else:
            self._baton.fail(self._index, error)
        return True
