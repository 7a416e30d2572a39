"""Stretches of time: what they cover together, and what two groups of them have in common."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[int, int]  # begin and end


def united(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the same time as intervals that rise and do not touch; empty ones count nothing."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def covered(intervals: Iterable[Interval]) -> int:
    """Returns how much time lies in at least one of the intervals."""
    return sum(end - begin for begin, end in united(intervals))


def common(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """Returns the time that lies in both groups, as `united` gives it."""
    ones, others = united(first), united(second)
    found: list[Interval] = []
    place = 0
    for begin, end in ones:
        while place < len(others) and others[place][1] <= begin:
            place += 1
        for other in others[place:]:
            if other[0] >= end:
                break
            found.append((max(begin, other[0]), min(end, other[1])))
    return found
