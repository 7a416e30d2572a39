"""Rows of numbers that processes of one host show each other in shared memory.

The memory has no name in any file system: the rank that makes it tells the others its process and
descriptor, and it goes with the last of them, however they end.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import struct
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import NoReturn

PLACE_WIDTH = 4
_NUMBER = struct.Struct("<q")
_CHECK = struct.Struct("<I")
_TOKEN_BITS = 63
_ALIGN_BYTES = 128  # two cache lines: they are fetched in pairs
_GAVE_UP = -1  # in place of a round's number
_SPIN_S = 5e-3
_LONG_YIELD_S = 2e-4
_PAUSES_A_WAIT = 16  # a pause is at most this part of the time waited so far
_LEAST_PAUSE_S, _MOST_PAUSE_S = 5e-5, 5e-3


class Board:
    """One rank's place at the board. A row a round; its first number is the round's.

    Each rank has two slots, which rounds take in turn. That is enough: a rank writes round n + 2
    over its row of round n only after it has read all rows of round n + 1, and a rank writes that
    one only after it has read all rows of round n. A row carries a checksum: read while it is
    being written, or in another order, it is not there yet, whatever the processor.

    A rank holds a record lock on its byte of the memory. The kernel takes it away when the process
    ends, before it is reaped and whatever ended it; children do not inherit it. It also goes when
    the process closes any descriptor of the memory, hence all stay open until `close`.

    Waiting keeps the core for some ms, unless yielding it shows that others want it, then pauses.
    """

    def __init__(self, descriptor: int, *, rank: int, size: int, width: int) -> None:
        """Takes the descriptor over; `width` is the numbers of a row, its round's included."""
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _num_bytes(size, width))
        self._numbers, self._written = struct.Struct(f"<{width}q"), struct.Struct(f"<{width}qI")
        stride = _stride(width)
        slots = [_ALIGN_BYTES + slot * size * stride for slot in (0, 1)]
        self._own = [slot + rank * stride for slot in slots]
        self._others = [
            [(peer, slot + peer * stride) for peer in range(size) if peer != rank] for slot in slots
        ]
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        self._pause = threading.Event()
        self._rows: list[tuple[int, ...]] = [()] * size
        self._number, self._until = 0, 0.0
        self._is_whole = False
        self._failure: str | None = None

    @classmethod
    def make(cls, *, rank: int, size: int, width: int) -> Board:
        """Makes the memory. An OSError says why that is not possible here."""
        if sys.platform != "linux":
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        descriptor = os.memfd_create("cgprof-board", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, _num_bytes(size, width))
            os.pwrite(descriptor, _NUMBER.pack(secrets.randbits(_TOKEN_BITS)), 0)
            return cls(descriptor, rank=rank, size=size, width=width)
        except OSError:
            os.close(descriptor)
            raise

    @classmethod
    def open(cls, place: Sequence[int], *, rank: int, size: int, width: int) -> Board:
        """Opens the memory of another rank's `place`.

        An OSError says why that is not possible: it is on another host, or hidden from this rank.
        """
        process, descriptor, inode, token = place
        path = f"/proc/{process}/fd/{descriptor}"
        found = os.stat(path)  # what is there on another host is not touched
        if (found.st_ino, found.st_size) != (inode, _num_bytes(size, width)):
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.pread(descriptor, _NUMBER.size, 0) != _NUMBER.pack(token):
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
            return cls(descriptor, rank=rank, size=size, width=width)
        except OSError:
            os.close(descriptor)
            raise

    @property
    def place(self) -> list[int]:
        """Where other ranks find the memory: process, descriptor, inode, token."""
        (token,) = _NUMBER.unpack_from(self._memory)
        return [os.getpid(), self._descriptor, os.fstat(self._descriptor).st_ino, token]

    def send(self, row: tuple[int, ...], timeout_s: float) -> Board:
        """Shows this rank's row of the next round to all; returns what to wait for."""
        if self._failure is not None:
            raise RuntimeError(self._failure)
        self._number, self._is_whole = row[0], False
        self._until = time.monotonic() + timeout_s
        self._rows = [row] * len(self._rows)
        self._write(self._number, row)
        return self

    def wait(self, timeout: timedelta) -> None:
        """Returns once all rows of the round are there.

        A RuntimeError says why they are not: `timeout` or the round's own is over, or a rank left
        or is gone, in which case the round is completed.
        """
        if self._look():
            return
        limit_s = timeout.total_seconds()
        began, may_spin = time.monotonic(), True
        while not self._look():
            now = time.monotonic()
            if may_spin and now - began < _SPIN_S:
                os.sched_yield()
                may_spin = time.monotonic() - now < _LONG_YIELD_S
                continue
            self._find_gone()
            if now >= self._until:
                self._fail("timed out")
            if now - began >= limit_s:
                raise RuntimeError(f"waited {limit_s:g} s")
            pause = (now - began) / _PAUSES_A_WAIT
            self._pause.wait(min(max(pause, _LEAST_PAUSE_S), _MOST_PAUSE_S))

    def is_completed(self) -> bool:
        """Whether waiting again returns or fails at once."""
        return self._failure is not None or self._is_whole

    def rows(self) -> list[tuple[int, ...]]:
        """Returns the rows of a completed round in rank order."""
        return self._rows

    def leave(self) -> None:
        """Tells all who wait, or will, that this rank gave up. No round can follow."""
        if self._memory.closed:
            return
        self._failure = self._failure or "gave up before"
        row = (_GAVE_UP,) * (self._numbers.size // _NUMBER.size)
        for number in (0, 1):
            self._write(number, row)

    def close(self) -> None:
        """Lets go of the memory. Others find this rank gone in the rounds that follow."""
        if self._memory.closed:
            return
        self._failure = "closed"
        self._memory.close()
        os.close(self._descriptor)

    def _look(self) -> bool:
        """Reads the others' rows in order; returns whether all are there."""
        if self._failure is not None:
            raise RuntimeError(self._failure)
        for rank, start in self._others[self._number % 2]:
            if not self._read(rank, start):
                return False
        self._is_whole = True
        return True

    def _read(self, rank: int, start: int) -> bool:
        *row, check = self._written.unpack_from(self._memory, start)
        if row[0] != self._number and row[0] != _GAVE_UP:
            return False
        if check != zlib.crc32(self._numbers.pack(*row)):
            return False
        if row[0] == _GAVE_UP:
            self._fail(f"rank {rank} gave up")
        self._rows[rank] = tuple(row)
        return True

    def _write(self, number: int, row: tuple[int, ...]) -> None:
        check = zlib.crc32(self._numbers.pack(*row))
        self._written.pack_into(self._memory, self._own[number % 2], *row, check)

    def _find_gone(self) -> None:
        """Fails if a rank's lock is free and its row, which it may have written last, is not there.

        Several ranks may hold the lock that is asked for here.
        """
        for rank, start in self._others[self._number % 2]:
            if self._read(rank, start):
                continue
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, rank)
            except OSError:
                continue
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, rank)
            if not self._read(rank, start):
                self._fail(f"rank {rank} is gone")

    def _fail(self, why: str) -> NoReturn:
        self._failure = why
        raise RuntimeError(why)


def _stride(width: int) -> int:
    used = width * _NUMBER.size + _CHECK.size
    return -(-used // _ALIGN_BYTES) * _ALIGN_BYTES


def _num_bytes(size: int, width: int) -> int:
    return _ALIGN_BYTES + 2 * size * _stride(width)
