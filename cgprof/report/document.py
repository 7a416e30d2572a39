"""What a command prints, in each of its formats: the one place that knows them.

Text and Markdown are for people: times and sizes have units, long lists are shortened. JSON and
CSV are for programs: integers of ns and bytes, their units in the names, what is unknown is null.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cgprof.errors import ConfigError
from cgprof.report.formats import OutputFormat
from cgprof.report.layout import Plain, Table, escape_markdown


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Lines for people, under a title."""

    lines: Sequence[str]
    title: str = ""

    def to_text(self) -> str:
        """Returns title and lines; '(none)' stands for no lines under a title."""
        if not self.title:
            return "\n".join(self.lines)
        return "\n".join([self.title, *(self.lines or ["(none)"])])

    def to_markdown(self) -> str:
        """Returns the lines as a list under a heading."""
        listed = "\n".join(f"- {escape_markdown(' '.join(line.split()))}" for line in self.lines)
        if not self.title:
            return listed
        return f"### {escape_markdown(self.title)}\n\n{listed or '(none)'}"


Block = Lines | Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """What people read in `blocks`, programs in `tables` and `data`.

    The first of `tables` is the main one; those of one name are one to programs. `data` returns
    plain values, the whole of what the command found.
    """

    blocks: Sequence[Block]
    tables: Sequence[Table]
    data: Callable[[], object]

    def render(self, output_format: OutputFormat, table: str | None = None) -> str:
        """Returns the document, or one of its tables alone, without a last line end.

        Raises:
            ConfigError: There is no such table.
        """
        blocks = self.blocks
        if table is not None:
            blocks = self._named(table)
        match output_format:
            case OutputFormat.TEXT:
                return "\n\n".join(block.to_text() for block in blocks)
            case OutputFormat.MD:
                return "\n\n".join(block.to_markdown() for block in blocks)
            case OutputFormat.JSON:
                return strict_json(self.data() if table is None else _rows(self._named(table)))
            case OutputFormat.CSV:
                return _csv(self._named(table or self.tables[0].name))

    def _named(self, name: str) -> list[Table]:
        found = [table for table in self.tables if table.name == name]
        if not found:
            known = ", ".join(dict.fromkeys(table.name for table in self.tables))
            raise ConfigError("--table", f"{name!r} is no table of this command; it has {known}")
        return found


def strict_json(value: object) -> str:
    """Returns JSON in ASCII that every parser takes; NaN and infinity are faults of the caller."""
    return json.dumps(value, indent=2, allow_nan=False)


def _rows(tables: Sequence[Table]) -> list[dict[str, Plain]]:
    """The rows of tables of one name, each with every column of them."""
    names = _names(tables)
    return [{name: row.get(name) for name in names} for table in tables for row in table.records()]


def _csv(tables: Sequence[Table]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, _names(tables), lineterminator="\n")
    writer.writeheader()
    writer.writerows(_rows(tables))
    return text.getvalue().removesuffix("\n")


def _names(tables: Sequence[Table]) -> list[str]:
    return list(dict.fromkeys(name for table in tables for name in table.record_names()))
