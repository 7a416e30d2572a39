"""Items of tasks on their way to a table and back: one row an item and phase."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from cgprof.record.scores import ItemScore

ITEM_SCHEMA = pa.schema(
    [
        *(pa.field(name, pa.string()) for name in ("task", "kind", "phase", "item_id", "prompt")),
        *(pa.field(name, pa.string()) for name in ("gold", "output")),
        pa.field("token_ids", pa.list_(pa.int32())),
        pa.field("score", pa.float64()),
        pa.field("correct", pa.bool_()),
        pa.field("answered", pa.bool_()),
        pa.field("choice_scores", pa.list_(pa.float64())),
    ]
)


def items_table(items: Sequence[ItemScore]) -> pa.Table:
    """Returns the items in their order."""
    return pa.Table.from_pylist([item.model_dump() for item in items], schema=ITEM_SCHEMA)


def items_of(table: pa.Table) -> tuple[ItemScore, ...]:
    """Returns the items of a table.

    Raises:
        ValueError: A row is no item; pydantic's own is one.
    """
    return tuple(ItemScore.model_validate(row) for row in table.to_pylist())
