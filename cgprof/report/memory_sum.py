"""Does graph memory add up: the parts, each measured by itself, against the device's growth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cgprof.record.graph import GraphMemory, GraphRecord, MemoryTotals, MemoryWitness
from cgprof.record.types import RankRecord
from cgprof.report.layout import Cell, Table
from cgprof.units import format_bytes

# What may stay unexplained: a few of the driver's pages, or a share of a large growth.
REST_FLOOR_BYTES = 4 * 1024**2
REST_SHARE = 0.02

ADDS_UP = "adds up"
MOVED = "doubtful: neighbours moved"
RELEASED = "doubtful: memory was released"
DOES_NOT_ADD_UP = "does not add up"
NO_DEVICE = "tape: arena bytes, no device"

_COLUMNS = {
    "what": "graphs of",
    "pool_bytes": "pool",
    "instantiate_bytes": "instantiate, upload",
    "workspaces_bytes": "workspaces",
    "parts_bytes": "sum of parts",
    "rest_bytes": "rest",
    "released_bytes": "released",
    "device_delta_bytes": "device delta",
    "nvml_bytes": "NVML",
    "rest_share": "rest/delta",
    "outputs_bytes": "outputs before",
    "verdict": "verdict",
}
_WARNED_OF_NEIGHBOUR = "neighbour-moved"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySum:
    """Growth over some keys; no part is negative, what was given back is `released_bytes`.

    On a device, parts + rest - released = device delta.
    """

    what: str
    pool_bytes: int
    instantiate_bytes: int
    workspaces_bytes: int
    given_back_bytes: int  # negative parts, as a positive number
    device_delta_bytes: int | None
    nvml_bytes: int | None
    allocator_bytes: int
    moved: bool  # another process took or gave back memory meanwhile

    @property
    def parts_bytes(self) -> int:
        """What the parts took."""
        return self.pool_bytes + self.instantiate_bytes + self.workspaces_bytes

    @property
    def unexplained_bytes(self) -> int | None:
        """Device delta minus parts; negative where more was given back than parts tell."""
        if self.device_delta_bytes is None:
            return None
        return self.device_delta_bytes - self.parts_bytes + self.given_back_bytes

    @property
    def rest_bytes(self) -> int | None:
        """What was taken and is in no part."""
        rest = self.unexplained_bytes
        return None if rest is None else max(rest, 0)

    @property
    def released_bytes(self) -> int:
        """What was given back, by parts and besides."""
        return self.given_back_bytes + max(-(self.unexplained_bytes or 0), 0)

    @property
    def tolerance_bytes(self) -> int:
        """What may stay unexplained of this growth."""
        return max(REST_FLOOR_BYTES, int(REST_SHARE * (self.device_delta_bytes or 0)))

    @property
    def own_bytes(self) -> int | None:
        """This process's growth: NVML's where neighbours moved, else the device's."""
        return self.nvml_bytes if self.moved else self.device_delta_bytes

    @property
    def verdict(self) -> str:
        """Whether the parts and the device's growth agree, in words."""
        rest, delta = self.unexplained_bytes, self.device_delta_bytes
        if rest is None or delta is None:
            return NO_DEVICE
        if self.moved:
            return MOVED
        if delta < 0:
            return RELEASED
        return ADDS_UP if abs(rest) <= self.tolerance_bytes else DOES_NOT_ADD_UP


def memory_sums(rank: RankRecord) -> tuple[MemorySum, ...]:
    """Returns plain keys, twins, and all; nothing before the totals are known."""
    totals = rank.totals
    if totals is None:
        return ()
    plain = [graph for graph in rank.graphs if not graph.key.is_twin]
    twins = [graph for graph in rank.graphs if graph.key.is_twin]
    first = _sum_of("plain keys", plain, totals.plain_witness)
    second = _sum_of("twins", twins, totals.twin_witness)
    return first, second, _both(first, second)


def memory_sum_table(rank: RankRecord) -> Table:
    """Returns one row each for plain keys, twins and all of a rank."""
    sums = memory_sums(rank)
    return Table(
        name="memory-sum",
        title="graph memory, part by part",
        columns=_COLUMNS,
        rows=tuple(_row(one, rank.totals) for one in sums),
        notes=_notes(sums),
    )


def own_growth_bytes(graph: GraphRecord) -> int | None:
    """Returns what this process took for one key: NVML's figure where neighbours moved."""
    seen = graph.witness
    if seen is None:
        return None
    return seen.nvml_delta_bytes if saw_neighbour(graph) else seen.device_delta_bytes


def saw_neighbour(graph: GraphRecord) -> bool:
    """Whether another process took or gave back memory while this key was captured."""
    moved = graph.witness is not None and graph.witness.neighbours == "moved"
    return moved or any(text.startswith(_WARNED_OF_NEIGHBOUR) for text in graph.warnings)


def _sum_of(what: str, graphs: Sequence[GraphRecord], seen: MemoryWitness) -> MemorySum:
    parts = [graph.memory for graph in graphs if graph.memory is not None]
    pool = [size for part in parts for size in part.pool_by_stream.values()]
    workspaces = [size for part in parts for size in part.workspaces.values()]
    driver = [_instantiate(part) for part in parts]
    return MemorySum(
        what=what,
        pool_bytes=_taken(pool),
        instantiate_bytes=_taken(driver),
        workspaces_bytes=_taken(workspaces),
        given_back_bytes=_taken(-size for size in (*pool, *workspaces, *driver)),
        device_delta_bytes=seen.device_delta_bytes,
        nvml_bytes=seen.nvml_delta_bytes,
        allocator_bytes=seen.allocator_bytes,
        moved=seen.neighbours == "moved" or any(map(saw_neighbour, graphs)),
    )


def _instantiate(part: GraphMemory) -> int:
    return part.instantiate_bytes or 0


def _taken(sizes: Iterable[int]) -> int:
    return sum(size for size in sizes if size > 0)


def _both(first: MemorySum, second: MemorySum) -> MemorySum:
    return MemorySum(
        what="all",
        pool_bytes=first.pool_bytes + second.pool_bytes,
        instantiate_bytes=first.instantiate_bytes + second.instantiate_bytes,
        workspaces_bytes=first.workspaces_bytes + second.workspaces_bytes,
        given_back_bytes=first.given_back_bytes + second.given_back_bytes,
        device_delta_bytes=_added(first.device_delta_bytes, second.device_delta_bytes),
        nvml_bytes=_added(first.nvml_bytes, second.nvml_bytes),
        allocator_bytes=first.allocator_bytes + second.allocator_bytes,
        moved=first.moved or second.moved,
    )


def _added(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def _row(one: MemorySum, totals: MemoryTotals | None) -> tuple[Cell, ...]:
    delta, rest = one.device_delta_bytes, one.rest_bytes
    has_device = delta is not None
    return (
        one.what,
        one.pool_bytes,
        one.instantiate_bytes if has_device else None,
        one.workspaces_bytes if has_device else None,
        one.parts_bytes,
        rest,
        one.released_bytes or None,
        _usage(delta),
        _usage(one.nvml_bytes),
        rest / delta if rest is not None and delta is not None and delta > 0 else None,
        totals.outputs_bytes if totals is not None and one.what == "all" else None,
        one.verdict,
    )


def _usage(size: int | None) -> int | None:
    """A growth that is negative is no usage."""
    return None if size is None or size < 0 else size


def _notes(sums: Sequence[MemorySum]) -> tuple[str, ...]:
    if all(one.device_delta_bytes is None for one in sums):
        return ("a tape's graphs live in its arena; nothing of this is GPU memory",) if sums else ()
    return (
        f"adds up: rest within {format_bytes(REST_FLOOR_BYTES)} or {REST_SHARE:.0%} of the device "
        "delta, whichever is more; parts are sums over keys, the delta is of the whole",
        "outputs lie before the first capture and are in no sum; released: given back meanwhile, "
        "parts + rest - released = device delta",
    )
