"""Which rank is to blame: for a value unlike the others', for silence, for a device that hangs."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from torch._C._distributed_c10d import Store

from cgprof.errors import RankError

_GRACE_S = 3.0  # how long ranks that gave up wait to hear who else did
_LOOK_S = 0.1


class GaveUp:
    """What ranks that gave up left in the store, by which those that did not are found."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size

    def has_any(self) -> bool:
        """Whether a rank gave up, or the store went with the rank that kept it."""
        try:
            return any(map(self._has, range(self._size)))
        except RuntimeError:
            return True

    def blame(self, what: str, waited: str) -> RankError | None:
        """Gives up as well, and returns whose fault it is; None if that cannot be known.

        Takes some seconds where a rank is silent. Ranks whose devices do not finish are all
        told alike.

        Args:
            what: What this rank's device does not finish; empty where it waits for other ranks.
            waited: Who waits for what, should a rank be silent.
        """
        try:
            # Where this rank gave up before, what it waited for stays.
            self._store.compare_set(_key(self._rank), "", what)
            silent = self._silent()
            if silent:
                also = f", nor did {_listed(silent[1:])}" if silent[1:] else ""
                return RankError(silent[0], f"did not answer{also}; {waited}")
            told = [self._store.get(_key(rank)).decode() for rank in range(self._size)]
        except RuntimeError:  # the store went with the rank that kept it
            return None
        return _first_stuck({rank: words for rank, words in enumerate(told) if words})

    def _silent(self) -> list[int]:
        """The ranks that have not given up some seconds after this one did."""
        pause, end = threading.Event(), time.monotonic() + _GRACE_S
        while silent := [rank for rank in range(self._size) if not self._has(rank)]:
            if time.monotonic() >= end:
                break
            pause.wait(_LOOK_S)  # the store's own wait warns on stderr when it ends
        return silent

    def _has(self, rank: int) -> bool:
        return self._store.check([_key(rank)])


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


def _first_stuck(stuck: Mapping[int, str]) -> RankError | None:
    """Names the first rank whose device does not finish, and the first with other work."""
    if not stuck:
        return None
    (first, words), *others = stuck.items()
    for rank, other in others:
        if other != words:
            words += f"; rank {rank}: {other}; see --verify-decisions"
            break
    return RankError(first, words)


def _key(rank: int) -> str:
    return f"gave-up/{rank}"


def _has(count: int) -> str:
    return "has" if count == 1 else "have"


def _listed(ranks: Sequence[int]) -> str:
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {', '.join(map(str, ranks))}"
