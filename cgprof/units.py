"""Prints times and memory for people; everywhere else they are integers of ns and bytes."""

from __future__ import annotations

from collections.abc import Sequence

_KIB = 1024


def format_ns(ns: float | None) -> str:
    """Returns a time with a unit that keeps three significant figures, or '-' for None."""
    if ns is None:
        return "-"
    for limit, divisor, unit in ((1e3, 1.0, "ns"), (1e6, 1e3, "us"), (1e9, 1e6, "ms")):
        if abs(ns) < limit:
            return f"{_three_figures(ns / divisor)} {unit}"
    return f"{_three_figures(ns / 1e9)} s"


def format_bytes(num_bytes: float | None) -> str:
    """Returns a size in B, KiB, MiB or GiB, or '-' for None."""
    if num_bytes is None:
        return "-"
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < _KIB:
            return f"{_three_figures(value)} {unit}"
        value /= _KIB
    return f"{value:.2f} GiB"


def format_gib(num_bytes: float | None) -> str:
    """Returns a size in GiB with two decimals, as engines print it, or '-' for None."""
    return "-" if num_bytes is None else f"{num_bytes / _KIB**3:.2f} GiB"


def format_ranges(numbers: Sequence[int]) -> str:
    """Returns sorted numbers with neighbours joined, such as '9-12, 17'."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def _three_figures(value: float) -> str:
    if value == int(value) and abs(value) < _KIB:
        return str(int(value))
    magnitude = abs(value)
    decimals = 0 if magnitude >= 100 else 1 if magnitude >= 10 else 2
    return f"{value:.{decimals}f}"
