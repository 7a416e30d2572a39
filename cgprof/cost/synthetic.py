"""Times the launches of synthetic graphs, and fits the launch model to them. CUDA only.

A run's own graphs take turns with them: hosts change their pace from second to second, so that only
what was timed together, by a host that did the same before, can be compared. Run it after all that
reads memory: the driver keeps what the graphs took for later ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from cgprof.cost.launch_model import fit
from cgprof.cost.synthetic_graphs import GraphBuilder, graph_builder
from cgprof.cost.synthetic_layout import Spec, specs
from cgprof.cost.turns import WORKED_NS, Host, Series, TimedSeries, full_pace_ns, run_passes
from cgprof.errors import DeviceError
from cgprof.graphs.cuda import CudaRecording, gc_paused
from cgprof.graphs.recorder import Recording
from cgprof.measure.clock import CudaClock
from cgprof.record.cost import LaunchModel, LaunchPoint, NodeKind
from cgprof.record.graph import LaunchStats
from cgprof.record.worth import Estimate
from cgprof.units import format_ns

_BUDGET_NS = 60_000_000_000  # building and timing; what is not timed by then is left out
_DEAR_NS = 20_000_000  # a series stops growing when one launch takes so long
_CALIBRATION_CYCLES = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnGraph:
    """A graph of the run; `prepare` writes inputs on which replaying it is valid."""

    label: str
    recording: Recording
    prepare: Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLaunches:
    """Launches of a graph of the run: by a warm host, and in pairs with those after a wait.

    The wait is the graph's own time on the device (median).
    """

    warm: LaunchStats
    after_wait: LaunchStats
    waited_ns: int
    wait_adds: Estimate  # in ns
    slow_adds: Estimate | None  # in ns, to a warm launch while the host was slower


def measure_launch_model(
    device: torch.device, seed: int, own: Sequence[OwnGraph] = ()
) -> tuple[LaunchModel, dict[str, OwnLaunches]]:
    """Returns the launch model of a device, and the launches of the run's own graphs by label.

    Takes twenty to thirty seconds, and up to a minute beside a slow host. The device must be idle.
    A second device that can be reached is used for copies to a peer.

    Raises:
        DeviceError: A graph is not what was asked for, a call failed, or too little was measured.
    """
    with graph_builder(device) as builder:
        timed = time_graphs(builder, specs(with_peer=builder.has_peer), own)
        notes = (*builder.notes, *timed.notes)
    facts = {
        "notes": notes,
        "process_id": os.getpid(),
        "worked_ns": WORKED_NS,
        "full_pace_share": timed.full_pace_share,
    }
    return fit(timed.points, seed).model_copy(update=facts), timed.own


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedGraphs:
    """Synthetic graphs as points, the run's own by label, and what was left out and why."""

    points: tuple[LaunchPoint, ...]
    own: dict[str, OwnLaunches]
    notes: tuple[str, ...]
    full_pace_share: float  # of all launches, those at the host's full pace


def time_graphs(
    builder: GraphBuilder, wanted: Sequence[Spec], own: Sequence[OwnGraph] = ()
) -> TimedGraphs:
    """Returns the launch times of graphs that take turns.

    Each launch is a `replay` call on an idle device. The host works for a fixed time before it,
    save in series that ask for a wait; the run's own graphs are launched in both ways by turns.

    Raises:
        DeviceError: A graph is not what was asked for, or a call failed.
    """
    clock = CudaClock()
    deadline_ns = clock.read_ns() + _BUDGET_NS
    with gc_paused():
        host = Host(clock, builder.enqueue_kernel, _occupier(clock))
        series, notes = _build(builder, wanted, clock, host, deadline_ns)
        ways = (host.launch_warm, host.launch_after_wait)
        own_series = {one.label: Series(one.recording, ways, one.prepare) for one in own}
        for one in own_series.values():
            one.probe()
        run_passes([*(one for _, one in series), *own_series.values()], clock, deadline_ns)
        clock.synchronize()
    everything = {_named(spec): one for spec, one in series} | own_series
    late = [name for name, one in everything.items() if not one.paces]
    notes += [f"left out, the time was up: {', '.join(late)}"] if late else []
    paces = [pace_ns for one in everything.values() for pace_ns in one.paces]
    if not paces:
        raise DeviceError("no synthetic graph was timed before the time was up")
    slowest_ns = full_pace_ns(paces)
    timed = {name: one.timed(slowest_ns) for name, one in everything.items() if one.paces}
    slow = [name for name, one in timed.items() if not one.suffices]
    notes += [f"left out, the host ran slower meanwhile: {', '.join(slow)}"] if slow else []
    if len(slow) > len(timed) // 2:
        raise DeviceError(
            f"the host ran slower than at its best while {len(slow)} of {len(timed)} graphs were "
            "timed; run again on a quiet host"
        )
    good = {name: one for name, one in timed.items() if one.suffices}
    return TimedGraphs(
        points=tuple(
            _point(spec, good[_named(spec)]) for spec, _ in series if _named(spec) in good
        ),
        own={label: _own_launches(good[label]) for label in own_series if label in good},
        notes=tuple(notes),
        full_pace_share=sum(pace_ns <= slowest_ns for pace_ns in paces) / len(paces),
    )


def _build(
    builder: GraphBuilder,
    wanted: Sequence[Spec],
    clock: CudaClock,
    host: Host,
    deadline_ns: int,
) -> tuple[list[tuple[Spec, Series]], list[str]]:
    """Builds each graph once and launches each series once; one kind stops where it is too dear."""
    graphs: dict[tuple[tuple[NodeKind, int], ...], CudaRecording] = {}
    dear: dict[tuple[NodeKind, int], int] = {}  # of a kind, after a wait
    series, notes = [], []
    for spec in wanted:
        if (spec.kind, spec.busy_ns) in dear:
            took = format_ns(dear[spec.kind, spec.busy_ns])
            notes.append(f"left out, a launch with fewer took {took}: {_named(spec)}")
            continue
        if clock.read_ns() > deadline_ns:
            notes.append(f"left out, the time was up: {_named(spec)}")
            continue
        key = tuple(sorted(spec.counts.items()))
        if key not in graphs:
            graphs[key] = builder.build(spec)
        waiting = partial(host.launch_after_wait, busy_ns=spec.busy_ns)
        one = Series(graphs[key], (waiting if spec.busy_ns else host.launch_warm,))
        series.append((spec, one))
        launch_ns = one.probe()
        if launch_ns > _DEAR_NS:
            dear[spec.kind, spec.busy_ns] = launch_ns
    return series, notes


def _point(spec: Spec, series: TimedSeries) -> LaunchPoint:
    found = series.launches()
    return LaunchPoint(
        kind=spec.kind,
        counts=spec.in_graph,
        median_ns=found.median_ns,
        p25_ns=found.p25_ns,
        iqr_ns=found.iqr_ns,
        count=found.count,
        waited_ns=series.waited_ns() if spec.busy_ns else 0,
        worked_ns=0 if spec.busy_ns else WORKED_NS,
    )


def _own_launches(series: TimedSeries) -> OwnLaunches:
    warm, after_wait = 0, 1
    return OwnLaunches(
        warm=series.launches(warm),
        after_wait=series.launches(after_wait),
        waited_ns=series.waited_ns(after_wait),
        wait_adds=series.adds(after_wait, to=warm),
        slow_adds=series.slow_adds(warm),
    )


def _occupier(clock: CudaClock) -> Callable[[int], None]:
    """What keeps the device at work for so many ns."""
    cycles_per_ns = _cycles_per_ns(clock)

    def occupy(busy_ns: int) -> None:
        torch.cuda._sleep(round(busy_ns * cycles_per_ns))

    return occupy


def _cycles_per_ns(clock: CudaClock) -> float:
    """How far the counter of a spinning kernel runs; the second spin counts."""
    span, span_ns = clock.new_span(), None
    for _ in range(2):
        span.begin()
        torch.cuda._sleep(_CALIBRATION_CYCLES)
        span.end()
        span_ns = span.ns()
    if not span_ns:
        raise DeviceError("a spinning kernel took no time on the device: its clock is not usable")
    return _CALIBRATION_CYCLES / span_ns


def _named(spec: Spec) -> str:
    size = spec.counts.get(spec.kind, 0)
    busy = f" after {format_ns(spec.busy_ns)} of work" if spec.busy_ns else ""
    return f"{size} x {spec.kind}{busy}"
