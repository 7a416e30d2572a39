"""What single graphs hold in fresh processes, and the model of the others that follows."""

from __future__ import annotations

import math

from cgprof.record.graph import GraphMemory, MemoryWitness
from cgprof.record.strict import NonNegative, Record
from cgprof.record.worth import Estimate
from cgprof.shapes import GraphKey

# The least by which the driver's arena for graphs grows.
# Source: measured on an H200, driver 580.159.
ARENA_STEP_BYTES = 2 * 1024**2


class StandAlone(Record):
    """One key captured alone in a fresh process: no arena or pool of other graphs to reuse.

    What libraries keep for the process was there before the first reading.
    """

    key: GraphKey
    label: str
    nodes: NonNegative
    memory: GraphMemory | None = None
    witness: MemoryWitness | None = None
    process_id: NonNegative | None = None
    warnings: tuple[str, ...] = ()
    failure: str | None = None

    @property
    def total_bytes(self) -> int | None:
        """All that the key took: the device's growth, or that of a tape's arena."""
        if self.witness is None:
            return None
        delta = self.witness.device_delta_bytes
        return self.witness.allocator_bytes if delta is None else delta

    @property
    def driver_bytes(self) -> int | None:
        """What the driver took outside the allocator: instantiation, upload and the rest.

        None without a device, where it was not read, or where something was given back meanwhile.
        """
        memory = self.memory
        if memory is None or memory.instantiate_bytes is None or memory.rest_bytes is None:
            return None
        taken = memory.instantiate_bytes + memory.rest_bytes
        return taken if taken >= 0 else None


class NodeModel(Record):
    """The driver's bytes of a graph as base + per_node x nodes, from the keys that were measured.

    Memory that the allocator took is not in it.
    """

    base_bytes: float
    per_node_bytes: Estimate
    largest_error_bytes: NonNegative  # over the keys that it is fitted on
    fitted_on: tuple[str, ...]
    points: tuple[tuple[NonNegative, NonNegative], ...] = ()  # of those keys: (nodes, bytes)
    notes: tuple[str, ...] = ()

    def estimate(self, nodes: int) -> tuple[int, int]:
        """Returns the driver's bytes of so many nodes, and by how much that may be wrong.

        Several graphs of one process share the base: estimate the sum of their nodes. Few nodes may
        come out below zero: the arena has room for them from the start. The error is half the 95 %
        interval of a further graph, and never less than one step of the arena.
        """
        from cgprof.stats.line import fit_line

        value = round(self.base_bytes + self.per_node_bytes.value * nodes)
        line = fit_line(self.points)
        scatter = 0.0 if line is None else line.at(nodes)[1]
        return value, max(ARENA_STEP_BYTES, self.largest_error_bytes, math.ceil(scatter))
