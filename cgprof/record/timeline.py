"""Traced replays on their way to a table and back: one row an activity on the device, by start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cgprof.errors import RecordError

TIMELINES = "timelines.parquet"  # of rank 0, only where replays were traced
_WORD = pa.dictionary(pa.int32(), pa.string())
TIMELINE_SCHEMA = pa.schema(
    [
        pa.field("key", _WORD),
        pa.field("name", _WORD),
        pa.field("kind", _WORD),
        pa.field("role", _WORD),
        pa.field("stream", pa.int64()),
        pa.field("start_ns", pa.int64()),
        pa.field("duration_ns", pa.int64()),
    ]
)
_WORDS = ["key", "name", "kind", "role"]
_DELTAS = "DELTA_BINARY_PACKED"

Role = Literal["communication", "compute"]


class Activity(NamedTuple):
    """A kernel, copy or memset of one replay as the device ran it."""

    name: str  # as torch's profiler prints it
    kind: str  # as of a node
    role: Role
    stream: int  # the device's choice for a node, not the stream it was captured on
    start_ns: int  # since the first activity of the replay
    duration_ns: int


class TimelineTable:
    """The activities of one rank's traced replays, by label of the key; each replay's by start."""

    def __init__(self, replays: Mapping[str, Sequence[Activity]]) -> None:
        parts = [_part(label, found) for label, found in replays.items() if found]
        joined = pa.concat_tables(parts) if parts else TIMELINE_SCHEMA.empty_table()
        self.table: pa.Table = joined.unify_dictionaries()

    def write(self, path: Path) -> None:
        """Writes the table; starts rise, so their differences are kept."""
        pq.write_table(
            self.table,
            path,
            compression="zstd",
            use_dictionary=_WORDS,
            column_encoding={"start_ns": _DELTAS, "duration_ns": _DELTAS, "stream": _DELTAS},
        )


def read_timelines(path: Path) -> pa.Table:
    """Returns every activity that a run folder keeps; no rows where no replay was traced.

    Raises:
        RecordError: The file is damaged.
    """
    place = path / TIMELINES
    if not place.exists():
        return TIMELINE_SCHEMA.empty_table()
    if not place.is_file():
        raise RecordError(place, "is damaged: it is no file")
    try:
        table = pq.read_table(place)
    except (pa.ArrowException, OSError) as error:
        raise RecordError(place, f"is damaged: {str(error).splitlines()[0]}") from error
    if not table.schema.equals(TIMELINE_SCHEMA):
        raise RecordError(place, "is damaged: it has other columns")
    if any(column.null_count for column in table.columns):
        raise RecordError(place, "is damaged: a value is missing")
    if not set(table["role"].cast(pa.string()).to_pylist()) <= set(get_args(Role)):
        raise RecordError(place, "is damaged: it has an unknown role")
    if any(pc.any(pc.less(table[name], 0)).as_py() for name in ("start_ns", "duration_ns")):
        raise RecordError(place, "is damaged: a time is negative")
    return table


def read_timeline(path: Path, label: str) -> list[Activity]:
    """Returns the activities of one key's traced replay, by start.

    Raises:
        RecordError: The file is damaged, or no replay of this key was traced.
    """
    table = read_timelines(path)
    found = table.filter(pc.equal(table["key"].cast(pa.string()), label))
    if not found.num_rows:
        raise RecordError(path, f"holds no traced replay of {label}")
    return [Activity(**row) for row in found.drop_columns(["key"]).to_pylist()]


def _part(label: str, found: Sequence[Activity]) -> pa.Table:
    names, kinds, roles, *numbers = zip(*found, strict=True)
    columns = [
        pa.array([label] * len(found)).dictionary_encode(),
        *(pa.array(words).dictionary_encode() for words in (names, kinds, roles)),
        *(pa.array(values, pa.int64()) for values in numbers),
    ]
    return pa.Table.from_arrays(columns, schema=TIMELINE_SCHEMA)
