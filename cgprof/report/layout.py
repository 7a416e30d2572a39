"""Tables of plain values, shown aligned, as Markdown, or as rows for programs.

A column's name carries its unit, and only that decides how a value is shown: the suffixes are
`_ns`, `_bytes`, `_ratio` and `_interval`. What was not measured is None in a row and '-' in text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cgprof.units import format_bytes, format_ns

_GAP = "  "
_INTERVAL = "_interval"
_MARKDOWN = str.maketrans({mark: f"\\{mark}" for mark in "\\|*<`"})


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio and the bounds it lies between, None where there are none."""

    ratio: float
    low: float | None = None
    high: float | None = None


Plain = str | int | float | None
Cell = Plain | Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows under named columns; `columns` maps a name with its unit to what a person reads.

    `name` is what `--table` calls it. `tags` hold for every row; programs get them as columns in
    front, people read them in the title. People do not see an `optional` column without values.
    """

    name: str
    columns: Mapping[str, str]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""
    notes: tuple[str, ...] = ()
    tags: Mapping[str, Plain] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()

    def to_text(self) -> str:
        """Returns title, aligned rows and notes; '(none)' stands for no rows."""
        lines = [self.title] if self.title else []
        lines += align(*self._seen()) if self.rows else ["(none)"]
        return "\n".join([*lines, *self.notes])

    def to_markdown(self) -> str:
        """Returns the same as a GitHub table under a heading, with the notes as a list."""
        columns, rows = self._seen()
        lines = [_pipes(columns.values())]
        lines.append(_pipes(":---" if words else "---:" for words in _words(columns, rows)))
        for row in rows:
            shown = (show(name, cell) for name, cell in zip(columns, row, strict=True))
            lines.append(_pipes(map(escape_markdown, shown)))
        parts = [f"### {escape_markdown(self.title)}"] if self.title else []
        parts.append("\n".join(lines) if self.rows else "(none)")
        if self.notes:
            parts.append("\n".join(f"- {escape_markdown(note)}" for note in self.notes))
        return "\n\n".join(parts)

    def records(self) -> list[dict[str, Plain]]:
        """Returns tags and raw values of each row; a float that is not finite becomes None."""
        tags = dict(self.tags)
        return [
            tags
            | {
                name: value
                for column, cell in zip(self.columns, row, strict=True)
                for name, value in _raw(column, cell).items()
            }
            for row in self.rows
        ]

    def record_names(self) -> list[str]:
        """Returns the names that every record has, in order."""
        return [*self.tags, *(name for column in self.columns for name in _raw(column, None))]

    def _seen(self) -> tuple[dict[str, str], list[tuple[Cell, ...]]]:
        kept = [
            index
            for index, name in enumerate(self.columns)
            if name not in self.optional or any(row[index] is not None for row in self.rows)
        ]
        names = list(self.columns)
        columns = {names[index]: self.columns[names[index]] for index in kept}
        return columns, [tuple(row[index] for index in kept) for row in self.rows]


def align(columns: Mapping[str, str], rows: Sequence[Sequence[Cell]]) -> list[str]:
    """Returns a heading, a rule and one line a row; words flush left, numbers flush right."""
    shown = [[show(name, cell) for name, cell in zip(columns, row, strict=True)] for row in rows]
    headings = list(columns.values())
    widths = [max(map(len, texts)) for texts in zip(headings, *shown, strict=True)]
    are_words = _words(columns, rows)

    def line(texts: Sequence[str]) -> str:
        cells = [
            text.ljust(width) if words else text.rjust(width)
            for text, width, words in zip(texts, widths, are_words, strict=True)
        ]
        return _GAP.join(cells).rstrip()

    return [line(headings), line(["-" * width for width in widths]), *map(line, shown)]


def escape_markdown(text: str) -> str:
    """Returns text that Markdown shows as it is."""
    return text.translate(_MARKDOWN)


def show(name: str, cell: Cell) -> str:
    """Returns one value with the unit that its column's name asks for."""
    if isinstance(cell, Interval):
        return _show_interval(cell)
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


def finite(cell: Plain) -> Plain:
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
    """Returns the text in printable ASCII on one line, cut with '...' beyond `limit` characters."""
    ascii_text = " ".join(text.split()).encode("ascii", "backslashreplace").decode()
    text = "".join(mark if mark.isprintable() else f"\\x{ord(mark):02x}" for mark in ascii_text)
    return text if limit is None or len(text) <= limit else f"{text[: limit - 3]}..."


def _show_interval(cell: Interval) -> str:
    if cell.low is None or cell.high is None:
        return f"{format_ratio(cell.ratio)} [no interval]"
    return f"{format_ratio(cell.ratio)} [{cell.low:.2f}, {cell.high:.2f}]"


def _raw(column: str, cell: Cell) -> dict[str, Plain]:
    """A cell for programs: an interval becomes three numbers."""
    if column.endswith(_INTERVAL):
        stem = column.removesuffix(_INTERVAL)
        found = cell if isinstance(cell, Interval) else None
        return {
            f"{stem}_ratio": finite(found.ratio) if found else None,
            f"{stem}_low": finite(found.low) if found else None,
            f"{stem}_high": finite(found.high) if found else None,
        }
    return {column: None if isinstance(cell, Interval) else finite(cell)}


def _words(columns: Mapping[str, str], rows: Sequence[Sequence[Cell]]) -> list[bool]:
    """Which columns hold words; those flush left."""
    found = []
    for index in range(len(columns)):
        present = [row[index] for row in rows if row[index] is not None]
        found.append(bool(present) and all(isinstance(cell, str | Interval) for cell in present))
    return found


def _pipes(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
