"""One fixed row of numbers from every rank: how ranks talk besides their tensors.

Every talk starts with such a round, so ranks that are at different points of the program are named
instead of meeting in a collective of unlike sizes, which gloo answers by ending the process. Rows
go over shared memory where all ranks can open the same, else over the control group.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, Store

from cgprof.errors import RankError
from cgprof.parallel.blame import GaveUp, unlike
from cgprof.parallel.board import PLACE_WIDTH, Board

NUM_VALUES = 8
_HEADER = 2  # the round's number, its kind
_WIDTH = _HEADER + NUM_VALUES
_ZEROS = (0,) * NUM_VALUES
_LOOK = timedelta(seconds=1)


class RoundKind(IntEnum):
    """What a round is for."""

    VOTE = 1
    DECISION = 2
    OBJECTS = 3
    BARRIER = 4
    CARRIER = 5


class _Work(Protocol):
    """What was begun; the methods are those of a collective of the library."""

    def wait(self, timeout: timedelta) -> object: ...

    def is_completed(self) -> bool: ...


class _Carrier(Protocol):
    """Takes one rank's row to all others, and theirs here."""

    def send(self, row: tuple[int, ...], timeout_s: float) -> _Work: ...

    def rows(self) -> list[tuple[int, ...]]: ...

    def leave(self) -> None: ...

    def close(self) -> None: ...


class _GlooCarrier:
    """Rows by a collective of the control group."""

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        self._group = group
        # An all-to-all of one row repeated: one hop, where gloo's all-gather takes size - 1.
        self._mine, self._all = torch.zeros(2, size, _WIDTH, dtype=torch.int64)
        self._row = self._mine.numpy()
        self._options = AllToAllOptions()

    def send(self, row: tuple[int, ...], timeout_s: float) -> _Work:
        self._row[:] = row
        self._options.timeout = timedelta(seconds=timeout_s)
        return self._group.alltoall_base(self._all, self._mine, [], [], self._options)

    def rows(self) -> list[tuple[int, ...]]:
        return [tuple(row) for row in self._all.tolist()]

    def leave(self) -> None:
        """The connections, which the failed collective closed, tell the others."""

    def close(self) -> None:
        """The group goes with all groups."""


class Rounds:
    """The numbered rounds of one rank and its peers. One at a time, in buffers made once.

    `carrier` says what takes the rows and, if that is not shared memory, which rank lacks it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        store: Store,
        *,
        rank: int,
        size: int,
        share_within_s: float | None,
    ) -> None:
        """All ranks make theirs at once.

        Args:
            group: The control group.
            store: Where ranks say that they gave up.
            rank: This one.
            size: Of all.
            share_within_s: How long ranks may take to agree on shared memory. None: do not use it.
        """
        self._group, self._gave_up = group, GaveUp(store, rank, size)
        self._rank, self._size = rank, size
        self._carrier: _Carrier = _GlooCarrier(group, size)
        self._number = 0
        self._pending: _Work | None = None
        self.carrier = "gloo"
        if share_within_s is not None:
            self._choose(share_within_s)

    def start(self, kind: RoundKind, values: Sequence[int], *, timeout_s: float) -> None:
        """Sends this rank's values, at most NUM_VALUES of them, and returns at once.

        A round that was left without its finish is waited for first.
        """
        if self._pending is not None:
            self.finish()
        self._number += 1
        row = (self._number, kind, *values, *_ZEROS[len(values) :])
        self._pending = self._begin(lambda: self._carrier.send(row, timeout_s))

    def finish(self) -> list[tuple[int, ...]]:
        """Waits for all ranks and returns their values in rank order.

        Raises:
            RankError: A rank did not answer in time, is gone, or is in another round.
        """
        assert self._pending is not None, "finish without start"
        work, self._pending = self._pending, None
        self._wait(work)
        rows = self._carrier.rows()
        if any(row[:_HEADER] != rows[0][:_HEADER] for row in rows):
            raise unlike(
                "out of step",
                [f"round {row[0]} ({RoundKind(row[1]).name.lower()})" for row in rows],
            )
        return [row[_HEADER:] for row in rows]

    def all_bytes(self, mine: bytes, *, timeout_s: float) -> list[bytes]:
        """Returns every rank's bytes, of any length each, in rank order."""
        self.start(RoundKind.OBJECTS, [len(mine)], timeout_s=timeout_s)
        lengths = [values[0] for values in self.finish()]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        out = [torch.empty_like(padded) for _ in lengths]
        options = AllgatherOptions()
        options.timeout = timedelta(seconds=timeout_s)
        self._wait(self._begin(lambda: self._group.allgather([out], [padded], options)))
        return [row[:n].numpy().tobytes() for row, n in zip(out, lengths, strict=True)]

    def lost(self, error: RuntimeError) -> RankError:
        """Finds out which ranks are silent after a collective failed or ran out of time.

        Every rank that gives up says so in the store, which the others see within a second; those
        that do not are the ones to blame. No round can follow.
        """
        self._pending = None
        self._carrier.leave()
        reason = str(error).partition("\n")[0].rpartition("] ")[2].partition(". This is")[0]
        where = f"in round {self._number} ({reason})"
        return self._gave_up.blame("", f"others waited {where}") or RankError(
            self._rank, f"lost its peers {where}"
        )

    def stuck(self, what: str) -> RankError:
        """Finds out why this rank's device does not finish; called beside its blocked thread.

        Either a rank is silent, or all wait: those whose device does not finish say for what.
        """
        waited = f"on rank {self._rank} {what}"
        return self._gave_up.blame(what, waited) or RankError(self._rank, what)

    def close(self) -> None:
        """Lets go of what rows were carried by; ranks that still wait for this one hear it."""
        self._carrier.close()

    def _choose(self, timeout_s: float) -> None:
        """Takes shared memory if every rank could open it, so that all choose alike."""
        board, error = None, 0
        if self._rank == 0:
            board, error = _attempt(lambda: Board.make(rank=0, size=self._size, width=_WIDTH))
        self.start(RoundKind.CARRIER, board.place if board else (), timeout_s=timeout_s)
        place = self.finish()[0][:PLACE_WIDTH]
        if self._rank > 0:
            board, error = _attempt(
                lambda: Board.open(place, rank=self._rank, size=self._size, width=_WIDTH)
            )
        self.start(RoundKind.CARRIER, [error], timeout_s=timeout_s)
        errors = [values[0] for values in self.finish()]
        self._number = 0
        lacking = next((rank for rank, found in enumerate(errors) if found), None)
        if lacking is not None:
            why = os.strerror(errors[lacking])
            self.carrier = f"gloo: rank {lacking} cannot share memory with rank 0 ({why})"
            if board is not None:
                board.close()
        elif board is not None:
            self._carrier, self.carrier = board, "shared memory"

    def _begin(self, send: Callable[[], _Work]) -> _Work:
        try:
            return send()
        except RuntimeError as error:
            raise self.lost(error) from error

    def _wait(self, work: _Work) -> None:
        """Waits for what was begun, and looks every second whether a peer gave up waiting."""
        was_done = False
        while True:
            try:
                work.wait(_LOOK)
            except RuntimeError as error:
                if was_done or self._gave_up.has_any():
                    raise self.lost(error) from error
                was_done = work.is_completed()  # then the next wait has its outcome
            else:
                return


def _attempt(join: Callable[[], Board]) -> tuple[Board | None, int]:
    """Returns the board, or None and the number of the error that forbids it."""
    try:
        return join(), 0
    except OSError as error:
        return None, error.errno or errno.EIO
