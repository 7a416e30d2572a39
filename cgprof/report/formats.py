"""The names of the formats that every command prints in; light enough for `--help`."""

from __future__ import annotations

from enum import StrEnum


class OutputFormat(StrEnum):
    """How a command prints what it found: text and md for people, json and csv for programs."""

    TEXT = "text"
    MD = "md"
    JSON = "json"
    CSV = "csv"
