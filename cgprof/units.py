"""Prints times and memory for people, and reads sizes; else they are integers of ns and bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

_KIB = 1024
_UNITS = {
    "": 1,
    "b": 1,
    "kib": _KIB,
    "mib": _KIB**2,
    "gib": _KIB**3,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?([a-z]*)", re.ASCII)


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


def parse_bytes(text: str) -> int:
    """Returns the bytes that a text such as '0.5GiB', '512 MiB', '1GB' or '1073741824' means.

    Raises:
        ValueError: It is no such text; parts of a byte are cut off where there is a unit.
    """
    found = _SIZE.fullmatch(text.strip().lower())
    factor = None if found is None else _UNITS.get(found[2])
    if found is None or factor is None or (factor == 1 and "." in found[1]):
        raise ValueError(
            f"{text!r} is not a size; write whole bytes, or a number with KiB, MiB, GiB, KB, MB "
            "or GB, such as 0.5GiB"
        )
    return int(Fraction(found[1]) * factor)


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
