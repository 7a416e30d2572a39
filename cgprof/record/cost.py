"""What launching graphs costs: the replay call alone, and a model of it by kinds of node."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from cgprof.record.graph import LaunchStats, Timed
from cgprof.record.strict import NonNegative, Record
from cgprof.record.worth import Estimate

# Source: NCCL user guide, NCCL_GRAPH_MIXING_SUPPORT.
MIXING_OFF = "leave out --nccl-graph-mixing (NCCL_GRAPH_MIXING_SUPPORT=0)"

_NOTHING = Estimate(value=0.0, low=0.0, high=0.0)

NodeKind = Literal["kernel", "memset", "memcpy", "peer-copy", "event-record", "event-wait", "fork"]


class ReplayCost(Record):
    """The replay call alone, without the step around it; `cpu` is the calling thread's time."""

    idle: LaunchStats  # the device had nothing to do
    idle_cpu: LaunchStats
    busy: LaunchStats | None = None  # one replay was enqueued just before
    busy_cpu: LaunchStats | None = None
    busy_note: str = ""  # why there is none
    # Taking turns with the synthetic graphs of the model: idle, and the host did as before those.
    beside: LaunchStats | None = None
    after_wait: LaunchStats | None = None  # in pairs with beside, but at once after a wait
    waited_ns: NonNegative | None = None  # how long: a replay's time on the device (median)
    wait_adds: Estimate | None = None  # after_wait less beside, in ns: median over the pairs
    slow_adds: Estimate | None = None  # to beside, in ns, while the host ran slower
    traced: LaunchStats | None = None  # host interval of cudaGraphLaunch as CUPTI saw it
    traced_wall: LaunchStats | None = None  # our clock around the same calls
    traced_note: str = ""  # why there is none
    predicted: Estimate | None = None  # of beside, in ns, by the launch model
    predicted_wait: Estimate | None = None  # of wait_adds, by the same
    dominated_by: str = ""  # the largest term, in words
    process_id: NonNegative | None = None


class LaunchPoint(Timed):
    """One synthetic graph as it was timed. `counts` holds all that is in it, forks too."""

    kind: NodeKind  # what the series it belongs to varies
    counts: dict[NodeKind, NonNegative]
    waited_ns: NonNegative = 0  # host waited so long for the device and launched at once
    worked_ns: NonNegative = 0  # or worked so long on an idle device before it launched

    @property
    def nodes(self) -> int:
        """All nodes; a fork is not one."""
        return sum(count for kind, count in self.counts.items() if kind != "fork")


class CurvePoint(Record):
    """What this many nodes of a kind cost together, above all else in their graph."""

    nodes: NonNegative
    ns: Estimate


class LaunchTerm(Record):
    """What one more node of a kind costs. With a curve: beyond its end, between its points not."""

    kind: NodeKind
    ns_per_node: Estimate
    curve: tuple[CurvePoint, ...] = ()  # by rising nodes
    points: NonNegative = 0  # graphs that hold the kind

    def of(self, count: int) -> Estimate:
        """Returns what so many nodes add to a launch, in ns: along the curve if there is one."""
        knots = [0, *(point.nodes for point in self.curve)]
        inside = between(knots, [point.ns for point in self.curve], count)
        beyond = max(0, count - knots[-1])
        return Estimate(
            value=inside.value + self.ns_per_node.value * beyond,
            low=inside.low + self.ns_per_node.low * beyond,
            high=inside.high + self.ns_per_node.high * beyond,
        )


class WaitedTerm(Record):
    """What a launch costs more after the host has waited so long for the device."""

    waited_ns: NonNegative
    ns: Estimate
    ns_per_node: Estimate  # of any kind
    points: NonNegative = 0  # graphs launched after such a wait


class LaunchModel(Record):
    """Fitted from synthetic graphs of this run; a prediction is an estimate, never a time."""

    base_ns: Estimate
    terms: tuple[LaunchTerm, ...]
    points: tuple[LaunchPoint, ...]
    waited: tuple[WaitedTerm, ...] = ()  # by rising wait; between them by interpolation
    scatter: float | None = None  # of the points around the fit, relative, one standard deviation
    largest_error: float | None = None  # of the fit, relative, over its own points
    # Host worked so long before each launch that no wait precedes; None: it launched at once.
    worked_ns: NonNegative | None = None
    full_pace_share: float | None = None  # of all launches; those of a slower host are left out
    warm_scatter: float | None = None  # of the points without a wait alone, if there are any
    warm_largest_error: float | None = None
    notes: tuple[str, ...] = ()
    process_id: NonNegative | None = None


def between(knots: Sequence[int], heights: Sequence[Estimate], where: int) -> Estimate:
    """Returns a height, linear between rising knots, zero at the first, level beyond the last."""
    points = [(0, _NOTHING), *zip(knots[1:], heights, strict=True)]
    for (before, low), (after, high) in pairwise(points):
        if where < after:
            share = (where - before) / (after - before)
            return Estimate(
                value=low.value + share * (high.value - low.value),
                low=low.low + share * (high.low - low.low),
                high=low.high + share * (high.high - low.high),
            )
    return points[-1][1]
