"""One fixed row of numbers from every rank: how ranks talk over their control group.

Every talk starts with such a round, so ranks that are at different points of the program are named
instead of meeting in a collective of unlike sizes, which gloo answers by ending the process.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, Store

from cgprof.errors import RankError

NUM_VALUES = 8
_HEADER = 2  # the round's number, its kind
_LOOK_S = 1.0
_GRACE_S = 3.0  # how long ranks that gave up wait to hear who else did


class RoundKind(IntEnum):
    """What a round is for."""

    VOTE = 1
    DECISION = 2
    OBJECTS = 3
    BARRIER = 4


class Rounds:
    """The numbered rounds of one rank and its peers. One at a time, in buffers made once."""

    def __init__(self, group: dist.ProcessGroup, store: Store, *, rank: int, size: int) -> None:
        self._group, self._store = group, store
        self._rank, self._size = rank, size
        # An all-to-all of one row repeated: one hop, where gloo's all-gather takes size - 1.
        self._mine, self._all = torch.zeros(2, size, _HEADER + NUM_VALUES, dtype=torch.int64)
        self._rows = self._mine.numpy()
        self._options = AllToAllOptions()
        self._number = 0
        self._pending: dist.Work | None = None

    def start(self, kind: RoundKind, values: Sequence[int], *, timeout_s: float) -> None:
        """Sends this rank's values, at most NUM_VALUES of them, and returns at once.

        A round that was left without its finish is waited for first.
        """
        if self._pending is not None:
            self.finish()
        self._number += 1
        self._rows[:] = [self._number, kind, *values, *[0] * (NUM_VALUES - len(values))]
        self._options.timeout = timedelta(seconds=timeout_s)
        self._pending = self._begin(
            lambda: self._group.alltoall_base(self._all, self._mine, [], [], self._options)
        )

    def finish(self) -> list[list[int]]:
        """Waits for all ranks and returns their values in rank order.

        Raises:
            RankError: A rank did not answer in time, is gone, or is in another round.
        """
        assert self._pending is not None, "finish without start"
        work, self._pending = self._pending, None
        self._wait(work)
        rows: list[list[int]] = self._all.tolist()
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
        reason = str(error).partition("\n")[0].rpartition("] ")[2].partition(". This is")[0]
        try:
            self._store.set(_gave_up(self._rank), "1")
            silent = self._silent()
        except RuntimeError:  # the store went with the rank that kept it
            silent = []
        if not silent:
            return RankError(self._rank, f"lost its peers in round {self._number} ({reason})")
        also = f", nor did {_listed(silent[1:])}" if silent[1:] else ""
        waited = f"others waited in round {self._number} ({reason})"
        return RankError(silent[0], f"did not answer{also}; {waited}")

    def _silent(self) -> list[int]:
        """The ranks that have not given up some seconds after this one did."""
        pause, end = threading.Event(), time.monotonic() + _GRACE_S
        while silent := [rank for rank in range(self._size) if not self._has_given_up(rank)]:
            if time.monotonic() >= end:
                break
            pause.wait(_LOOK_S / 10)  # the store's own wait warns on stderr when it ends
        return silent

    def _has_given_up(self, rank: int) -> bool:
        return self._store.check([_gave_up(rank)])

    def _begin(self, collective: Callable[[], dist.Work]) -> dist.Work:
        try:
            return collective()
        except RuntimeError as error:
            raise self.lost(error) from error

    def _wait(self, work: dist.Work) -> None:
        """Waits for a collective, and looks every second whether a peer gave up waiting for it."""
        was_done = False
        while True:
            try:
                work.wait(timedelta(seconds=_LOOK_S))
            except RuntimeError as error:
                if was_done or self._has_peer_given_up():
                    raise self.lost(error) from error
                was_done = work.is_completed()  # then the next wait has its outcome
            else:
                return

    def _has_peer_given_up(self) -> bool:
        try:
            return any(map(self._has_given_up, range(self._size)))
        except RuntimeError:
            return True


def _gave_up(rank: int) -> str:
    return f"gave-up/{rank}"


def unlike(what: str, values: Sequence[str]) -> RankError:
    """Returns the error that names the ranks whose value is not that of most, with both values.

    When no value has a majority, the first of the most frequent is taken as the right one.
    """
    usual = Counter(values).most_common(1)[0][0]
    others = [rank for rank, value in enumerate(values) if value != usual]
    found = "; ".join(f"rank {rank} has {values[rank]}" for rank in others)
    like = _listed([rank for rank, value in enumerate(values) if value == usual])
    return RankError(
        others[0], f"{what}: {found}; {like} {_has(len(values) - len(others))} {usual}"
    )


def _has(count: int) -> str:
    return "has" if count == 1 else "have"


def _listed(ranks: Sequence[int]) -> str:
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {', '.join(map(str, ranks))}"
