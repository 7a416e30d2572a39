"""What is inside every captured graph. Reading nodes takes the driver's lock: after all timing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from cgprof.graphs.topology import contents
from cgprof.record.contents import GraphContents
from cgprof.record.graph import GraphRecord
from cgprof.record.nodes import NodeTable

if TYPE_CHECKING:
    from cgprof.engine.worker import Engine


def read_contents(
    engine: Engine, records: Iterable[GraphRecord]
) -> tuple[dict[str, GraphContents], NodeTable]:
    """Returns the contents of each captured key by its label, and the nodes of all of them.

    Raises:
        DeviceError: A call of the driver failed.
    """
    captured = engine.graphs.captured
    nodes = {
        record.label: captured[record.key].recording.read_nodes()
        for record in records
        if record.failure is None and record.key in captured
    }
    return {label: contents(found) for label, found in nodes.items()}, NodeTable(nodes)
