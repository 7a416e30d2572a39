"""What single graphs hold in fresh processes, and the model of the others that follows."""

from __future__ import annotations

from cgprof.record.graph import GraphMemory, MemoryWitness
from cgprof.record.strict import NonNegative, Record
from cgprof.record.worth import Estimate
from cgprof.shapes import GraphKey


class StandAlone(Record):
    """One key captured alone in a fresh process: no arena or pool of other graphs to reuse."""

    key: GraphKey
    label: str
    nodes: NonNegative
    memory: GraphMemory | None = None
    witness: MemoryWitness | None = None
    process_id: NonNegative | None = None
    failure: str | None = None


class NodeModel(Record):
    """Bytes of a graph alone as base + per_node x nodes, from the keys that were measured."""

    base_bytes: float
    per_node_bytes: Estimate
    largest_error_bytes: NonNegative  # over the keys that it is fitted on
    fitted_on: tuple[str, ...]
