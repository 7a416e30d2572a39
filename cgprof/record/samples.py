"""Samples on their way to a table: one row a step, arrays in and arrays out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Phase = Literal["eager", "first", "hot", "round-robin"]

STAGE_COLUMNS = ("decide_ns", "prepare_ns", "launch_ns", "finish_ns", "wait_ns", "device_ns")
_LABEL = pa.dictionary(pa.int32(), pa.string())
SAMPLE_SCHEMA = pa.schema(
    [
        pa.field("key", _LABEL),
        pa.field("phase", _LABEL),
        *(pa.field(name, pa.int64()) for name in STAGE_COLUMNS),
    ]
)


class SampleSink:
    """Collects series of samples and hands them out as one table."""

    def __init__(self) -> None:
        self._series: list[pa.Table] = []

    def append(
        self, key: str, phase: Phase, columns: Mapping[str, NDArray[np.int64] | None]
    ) -> None:
        """Adds a series; every array has one row a step, a missing column is null."""
        count = max(values.size for values in columns.values() if values is not None)
        arrays = [pa.array([label] * count).dictionary_encode() for label in (key, phase)]
        for name in STAGE_COLUMNS:
            values = columns.get(name)
            arrays.append(
                pa.nulls(count, pa.int64()) if values is None else pa.array(values, pa.int64())
            )
        self._series.append(pa.Table.from_arrays(arrays, schema=SAMPLE_SCHEMA))

    def table(self) -> pa.Table:
        """Returns all rows in the order they came."""
        if not self._series:
            return SAMPLE_SCHEMA.empty_table()
        return pa.concat_tables(self._series).unify_dictionaries()
