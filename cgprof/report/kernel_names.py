"""Names of kernels, short enough to read and to count by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

_ANONYMOUS = "(anonymous namespace)::"
_OPENING, _CLOSING = "<([{", ">)]}"


def short_name(name: str) -> str:
    """Returns a C++ name without return type, template arguments and parameters; others as is."""
    kept: list[str] = []
    depth = 0
    for mark in name.replace(_ANONYMOUS, ""):
        if mark == "(" and not depth and kept:
            break
        if mark in _OPENING:
            depth += 1
        elif mark in _CLOSING:
            depth -= 1
        elif not depth:
            kept.append(mark)
    words = "".join(kept).split()
    return words[-1] if words else name


def by_short_name(counts: Mapping[str, int]) -> dict[str, int]:
    """Returns the counts of names that are short alike as one, the most frequent first."""
    totals: Counter[str] = Counter()
    for name, count in counts.items():
        totals[short_name(name)] += count
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))
