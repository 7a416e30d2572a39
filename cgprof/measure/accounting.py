"""Two memory readings -> what grew between them, as witnesses and as parts. Pure.

A witness sees a whole growth; parts are places. Neither is ever computed from the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cgprof.measure.neighbours import ProcessView
from cgprof.record.graph import GraphMemory, MemoryWitness

# What GraphManager has just done when it lets memory be read inside a capture.
WARMED_UP = "warmed"
RECORDED = "recorded"
INSTANTIATED = "instantiated"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReading:
    """A device's memory at one moment; segments are what the allocator took from the driver."""

    free_bytes: int  # the driver's
    pool_by_stream: Mapping[str, int]  # segments of graph pools
    general_by_stream: Mapping[str, int]  # all other segments
    processes: ProcessView | None = None  # not read inside a capture

    @property
    def allocator_bytes(self) -> int:
        """All segments."""
        return sum(self.pool_by_stream.values()) + sum(self.general_by_stream.values())


def witness(before: DeviceReading, after: DeviceReading) -> MemoryWitness:
    """Returns the three views of what grew from `before` to `after`."""
    own_before, own_after = _own_bytes(before), _own_bytes(after)
    seen = own_before is not None and own_after is not None
    return MemoryWitness(
        allocator_bytes=after.allocator_bytes - before.allocator_bytes,
        device_delta_bytes=before.free_bytes - after.free_bytes,
        nvml_delta_bytes=own_after - own_before
        if own_before is not None and own_after is not None
        else None,
        nvml_note=None if seen else _note(after),
        neighbours=_neighbours(before, after),
    )


def graph_memory(
    before: DeviceReading, marks: Mapping[str, DeviceReading], after: DeviceReading
) -> GraphMemory:
    """Returns the parts of one capture from the readings before, between its phases, and after.

    Pool: segments of graph pools. Workspaces: other segments that stay after the warm-up, so what
    libraries keep for each stream. Instantiate: what the driver took besides the allocator while
    the graph was instantiated and uploaded. `rest` may be negative: then something was given back.
    """
    pool = growth(before.pool_by_stream, after.pool_by_stream)
    warmed = marks.get(WARMED_UP)
    workspaces = (
        {} if warmed is None else growth(before.general_by_stream, warmed.general_by_stream)
    )
    instantiate = None
    if RECORDED in marks and INSTANTIATED in marks:
        instantiate = _outside_allocator(marks[RECORDED], marks[INSTANTIATED])
    parts = sum(pool.values()) + sum(workspaces.values()) + (instantiate or 0)
    return GraphMemory(
        pool_by_stream=pool,
        instantiate_bytes=instantiate,
        workspaces=workspaces,
        rest_bytes=before.free_bytes - after.free_bytes - parts,
    )


def growth(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Returns what changed, stream by stream; streams without a change are left out."""
    streams = sorted(set(before) | set(after))
    changes = {stream: after.get(stream, 0) - before.get(stream, 0) for stream in streams}
    return {stream: change for stream, change in changes.items() if change}


def neighbour_moved(before: DeviceReading, after: DeviceReading) -> str | None:
    """Returns what another process did between the readings, or None if nothing is known of any."""
    first, last = before.processes, after.processes
    if first is None or last is None:
        return None
    if first.neighbour_pids is None or last.neighbour_pids is None:
        return None
    if first.neighbour_pids != last.neighbour_pids:
        return (
            f"processes beside this one: {len(first.neighbour_pids)} before, "
            f"{len(last.neighbour_pids)} after"
        )
    if first.neighbour_bytes != last.neighbour_bytes:
        return f"another process went from {first.neighbour_bytes} to {last.neighbour_bytes} bytes"
    return None


def _neighbours(
    before: DeviceReading, after: DeviceReading
) -> Literal["unknown", "none", "still", "moved"]:
    """What other processes did. Where this process or a size is not seen, others may be hidden."""
    if neighbour_moved(before, after) is not None:
        return "moved"
    for view in (before.processes, after.processes):
        if view is None or view.own_bytes is None or view.neighbour_bytes is None:
            return "unknown"
    return "still" if after.processes is not None and after.processes.neighbour_pids else "none"


def _outside_allocator(before: DeviceReading, after: DeviceReading) -> int:
    taken = before.free_bytes - after.free_bytes
    return taken - (after.allocator_bytes - before.allocator_bytes)


def _own_bytes(reading: DeviceReading) -> int | None:
    return None if reading.processes is None else reading.processes.own_bytes


def _note(reading: DeviceReading) -> str:
    if reading.processes is None:
        return "NVML was not read"
    return reading.processes.note or "NVML did not tell this process's memory at both readings"
