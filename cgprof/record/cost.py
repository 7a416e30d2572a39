"""What launching graphs costs: the replay call alone, and a model of it by kinds of node."""

from __future__ import annotations

from typing import Literal

from cgprof.record.graph import LaunchStats
from cgprof.record.strict import NonNegative, Record
from cgprof.record.worth import Estimate

NodeKind = Literal["kernel", "memset", "memcpy", "peer-copy", "event-record", "event-wait", "fork"]


class ReplayCost(Record):
    """The replay call alone, without the step around it; `cpu` is the calling thread's time."""

    idle: LaunchStats  # the device had nothing to do
    idle_cpu: LaunchStats
    busy: LaunchStats | None = None  # the replay before was still at work
    busy_cpu: LaunchStats | None = None
    traced: LaunchStats | None = None  # host interval of cudaGraphLaunch as CUPTI saw it
    traced_note: str = ""  # why there is none
    predicted: Estimate | None = None  # of idle, in ns, by the launch model
    dominated_by: str = ""  # the largest term, in words
    process_id: NonNegative | None = None


class LaunchPoint(Record):
    """One synthetic graph as it was timed."""

    kind: NodeKind
    forked: bool
    nodes: NonNegative
    median_ns: NonNegative
    iqr_ns: NonNegative
    count: NonNegative
    waited_ns: NonNegative = 0  # host waited so long for the device before each launch


class LaunchTerm(Record):
    """What one more node of a kind costs; a curve where that depends on how many there are."""

    kind: NodeKind
    ns_per_node: Estimate
    curve: tuple[tuple[NonNegative, NonNegative], ...] = ()  # (nodes, ns above the base)


class LaunchModel(Record):
    """Fitted from synthetic graphs of this run; a prediction is an estimate, never a time."""

    base_ns: Estimate
    terms: tuple[LaunchTerm, ...]
    points: tuple[LaunchPoint, ...]
    waited_ns: Estimate | None = None  # added after a wait as long as a step
    largest_error: float | None = None  # of the fit, relative, over its own points
    notes: tuple[str, ...] = ()
    process_id: NonNegative | None = None
