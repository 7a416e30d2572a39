"""Tables of plain values, shown as aligned ASCII text or as rows for JSON.

A column's name carries its unit, and only the unit decides how a value is shown: the suffixes are
`_ns`, `_bytes` and `_ratio`. What was not measured is None in a row and '-' in text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cgprof.units import format_bytes, format_ns

Cell = str | int | float | None
_GAP = "  "


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under named columns; `columns` maps a name with its unit to what a person reads."""

    title: str
    columns: dict[str, str]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    def to_text(self) -> str:
        """Returns title, aligned rows and notes; '(none)' stands for no rows."""
        lines = [self.title] if self.title else []
        lines += align(self.columns, self.rows) if self.rows else ["(none)"]
        return "\n".join([*lines, *self.notes])

    def records(self) -> list[dict[str, Cell]]:
        """Returns the rows as dictionaries; a float that is not finite becomes None."""
        return [
            {name: finite(cell) for name, cell in zip(self.columns, row, strict=True)}
            for row in self.rows
        ]


def align(columns: dict[str, str], rows: Sequence[Sequence[Cell]]) -> list[str]:
    """Returns a heading, a rule and one line a row; words flush left, numbers flush right."""
    shown = [[show(name, cell) for name, cell in zip(columns, row, strict=True)] for row in rows]
    headings = list(columns.values())
    widths = [max(map(len, texts)) for texts in zip(headings, *shown, strict=True)]
    are_words = [_holds_words(cells) for cells in zip(*rows, strict=True)]

    def line(texts: Sequence[str]) -> str:
        cells = [
            text.ljust(width) if words else text.rjust(width)
            for text, width, words in zip(texts, widths, are_words, strict=True)
        ]
        return _GAP.join(cells).rstrip()

    return [line(headings), line(["-" * width for width in widths]), *map(line, shown)]


def _holds_words(cells: Sequence[Cell]) -> bool:
    present = [cell for cell in cells if cell is not None]
    return bool(present) and all(isinstance(cell, str) for cell in present)


def show(name: str, cell: Cell) -> str:
    """Returns one value with the unit that its column's name asks for."""
    cell = finite(cell)
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return one_line(cell)
    if name.endswith("_ns"):
        return format_ns(cell)
    if name.endswith("_bytes"):
        return format_bytes(cell)
    if name.endswith("_ratio"):
        return format_ratio(cell)
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)


def finite(cell: Cell) -> Cell:
    """Returns the value, or None for NaN and infinity."""
    return None if isinstance(cell, float) and not math.isfinite(cell) else cell


def ratio(above: float | None, below: float | None) -> float | None:
    """Returns above / below, or None where either is missing or the divisor is not positive."""
    return above / below if above is not None and below is not None and below > 0 else None


def format_ratio(value: float | None) -> str:
    """Returns such as 'x2.05', or '-' for None; large ratios lose their decimals."""
    if value is None:
        return "-"
    return f"x{value:.2f}" if abs(value) < 100 else f"x{value:.0f}"


def one_line(text: str, limit: int | None = None) -> str:
    """Returns the text in ASCII on one line, cut with '...' beyond `limit` characters."""
    text = " ".join(text.split()).encode("ascii", "backslashreplace").decode()
    return text if limit is None or len(text) <= limit else f"{text[: limit - 3]}..."
