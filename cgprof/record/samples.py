"""Samples on their way to a table: one row a step, arrays in and arrays out.

Rows of the phases "idle" and "busy" are of the replay call alone, launch_ns and launch_cpu_ns of
one row of two calls: reading one clock would disturb the other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Phase = Literal["eager", "first", "hot", "round-robin", "idle", "busy"]

STAGE_COLUMNS = ("decide_ns", "prepare_ns", "launch_ns", "finish_ns", "wait_ns", "device_ns")
VOTE_COLUMN = "vote_ns"
LAUNCH_CPU_COLUMN = "launch_cpu_ns"  # of the calling thread
# Columns that older runs do not have.
LATER_FIELDS = (
    pa.field("process_id", pa.int64()),
    pa.field(VOTE_COLUMN, pa.int64()),
    pa.field(LAUNCH_CPU_COLUMN, pa.int64()),
)
_LABEL = pa.dictionary(pa.int32(), pa.string())
SAMPLE_SCHEMA = pa.schema(
    [
        pa.field("key", _LABEL),
        pa.field("phase", _LABEL),
        *(pa.field(name, pa.int64()) for name in STAGE_COLUMNS),
        *LATER_FIELDS,
    ]
)


class SampleSink:
    """Collects series of samples, one a key and phase, and hands them out as one table."""

    def __init__(self) -> None:
        self._series: list[tuple[str, Phase, pa.Table]] = []

    def append(
        self, key: str, phase: Phase, columns: Mapping[str, NDArray[np.int64] | None]
    ) -> None:
        """Adds a series; every array has one row a step, a missing column is null."""
        count = max(values.size for values in columns.values() if values is not None)
        arrays = [pa.array([label] * count).dictionary_encode() for label in (key, phase)]
        arrays += [_integers(columns.get(name), count) for name in STAGE_COLUMNS]
        arrays.append(pa.array([os.getpid()] * count, pa.int64()))
        arrays += [_integers(columns.get(name), count) for name in (VOTE_COLUMN, LAUNCH_CPU_COLUMN)]
        self._series.append((key, phase, pa.Table.from_arrays(arrays, schema=SAMPLE_SCHEMA)))

    def take(self, table: pa.Table) -> None:
        """Adds every series of another run's table."""
        self._series += _split(table)

    def keep(self, wanted: Callable[[str, Phase], bool]) -> None:
        """Drops each series whose key and phase are not wanted."""
        self._series = [series for series in self._series if wanted(series[0], series[1])]

    def table(self) -> pa.Table:
        """Returns all rows in the order they came."""
        if not self._series:
            return SAMPLE_SCHEMA.empty_table()
        return pa.concat_tables([table for _, _, table in self._series]).unify_dictionaries()


def _integers(values: NDArray[np.int64] | None, count: int) -> pa.Array:
    return pa.nulls(count, pa.int64()) if values is None else pa.array(values, pa.int64())


def _split(table: pa.Table) -> Iterator[tuple[str, Phase, pa.Table]]:
    for key in pc.unique(table["key"]).to_pylist():
        of_key = table.filter(pc.equal(table["key"], key))
        for phase in get_args(Phase):
            series = of_key.filter(pc.equal(of_key["phase"], phase))
            if series.num_rows:
                yield key, phase, series
