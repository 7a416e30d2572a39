"""Nodes of graphs on their way to a table and back: one row a node, in order within its graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cgprof.errors import RecordError

NODES = "nodes.parquet"  # of rank 0, only where nodes were read
_WORD = pa.dictionary(pa.int32(), pa.string())
NODE_SCHEMA = pa.schema(
    [
        pa.field("key", _WORD),
        pa.field("node", pa.int32()),
        pa.field("kind", _WORD),
        pa.field("name", _WORD),
        pa.field("after", pa.list_(pa.int32())),
    ]
)
_DELTAS = "DELTA_BINARY_PACKED"

NodeRow = tuple[str, str, tuple[int, ...]]  # kind, name, indices of the nodes it waits for


class NodeTable:
    """The nodes of one rank's graphs, by label of the key; each graph's in order."""

    def __init__(self, graphs: Mapping[str, Sequence[NodeRow]]) -> None:
        parts = [_part(label, rows) for label, rows in graphs.items() if rows]
        joined = pa.concat_tables(parts) if parts else NODE_SCHEMA.empty_table()
        self.table: pa.Table = joined.unify_dictionaries()

    def write(self, path: Path) -> None:
        """Writes the table; neighbours in a column differ little, so their differences are kept."""
        pq.write_table(
            self.table,
            path,
            compression="zstd",
            use_dictionary=["key", "kind", "name"],
            column_encoding={"node": _DELTAS, "after.list.element": _DELTAS},
        )


def read_nodes(path: Path, label: str, count: int | None = None) -> list[NodeRow]:
    """Returns the nodes of one key of a run, in order; `count` of them, where that is known.

    Raises:
        RecordError: The file is missing or damaged, or holds no or other nodes of this key.
    """
    place = path / NODES
    if not place.exists():
        problem = f"{NODES} is missing; nodes are kept by a run that measured all its keys"
        raise RecordError(path, problem)
    if not place.is_file():
        raise RecordError(place, "is damaged: it is no file")
    try:
        table = pq.read_table(place)
    except (pa.ArrowException, OSError) as error:
        raise RecordError(place, f"is damaged: {str(error).splitlines()[0]}") from error
    if not table.schema.equals(NODE_SCHEMA):
        raise RecordError(place, "is damaged: it has other columns")
    found = table.filter(pc.equal(table["key"].cast(pa.string()), label))
    if not found.num_rows:
        raise RecordError(place, f"holds no nodes of {label}")
    if count is not None and found.num_rows != count:
        raise RecordError(
            place, f"is damaged: it holds {found.num_rows} nodes of {label}, the run has {count}"
        )
    rows = found.drop_columns(["key"]).to_pylist()
    if not all(_is_in_order(index, row) for index, row in enumerate(rows)):
        raise RecordError(place, f"is damaged: the nodes of {label} are not in order")
    return [(row["kind"], row["name"], tuple(row["after"])) for row in rows]


def _part(label: str, rows: Sequence[NodeRow]) -> pa.Table:
    kinds, names, after = zip(*rows, strict=True)
    columns = [
        pa.array([label] * len(rows)).dictionary_encode(),
        pa.array(range(len(rows)), pa.int32()),
        pa.array(kinds).dictionary_encode(),
        pa.array(names).dictionary_encode(),
        pa.array(after, pa.list_(pa.int32())),
    ]
    return pa.Table.from_arrays(columns, schema=NODE_SCHEMA)


def _is_in_order(index: int, row: Mapping[str, object]) -> bool:
    after = row["after"]
    words = isinstance(row["kind"], str) and isinstance(row["name"], str)
    return (
        words
        and row["node"] == index
        and isinstance(after, list)
        and all(isinstance(before, int) and 0 <= before < index for before in after)
    )
