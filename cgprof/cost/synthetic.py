"""Times the launches of synthetic graphs, and fits the launch model to them. CUDA only.

A run's own graphs take turns with them: hosts change their pace from second to second, so that only
what was timed together can be compared. Run it after all that reads memory: the driver keeps what
the graphs took for later ones.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cgprof.cost.launch_model import fit
from cgprof.cost.synthetic_graphs import GraphBuilder, graph_builder
from cgprof.cost.synthetic_layout import Spec, specs
from cgprof.errors import DeviceError
from cgprof.graphs.cuda import CudaRecording, gc_paused
from cgprof.graphs.recorder import Recording
from cgprof.measure.clock import CudaClock
from cgprof.measure.samples import launch_stats
from cgprof.record.cost import LaunchModel, LaunchPoint, NodeKind
from cgprof.record.graph import LaunchStats
from cgprof.stats.quantiles import median
from cgprof.units import format_ns

_BUDGET_NS = 20_000_000_000  # building and timing; what is not timed by then is left out
_PASSES = 3  # over all graphs, so that a burst of noise spoils a part of each series only
_PASS_NS = 120_000_000  # of one graph in one pass, unless that leaves too few launches
_LEAST_LAUNCHES, _MOST_LAUNCHES, _WARMUP_LAUNCHES = 10, 20, 2  # in one pass
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
    """Launches of a graph of the run, and how long the host waited before each (median)."""

    stats: LaunchStats
    waited_ns: int


def measure_launch_model(
    device: torch.device, seed: int, own: Sequence[OwnGraph] = ()
) -> tuple[LaunchModel, dict[str, OwnLaunches]]:
    """Returns the launch model of a device, and the launches of the run's own graphs by label.

    Takes ten to twenty seconds. The device must be idle. A second device that can be reached is
    used for copies to a peer.

    Raises:
        DeviceError: A graph is not what was asked for, a call failed, or too little was measured.
    """
    with graph_builder(device) as builder:
        timed = time_graphs(builder, specs(with_peer=builder.has_peer), own)
        notes = (*builder.notes, *timed.notes)
    model = fit(timed.points, seed).model_copy(update={"notes": notes, "process_id": os.getpid()})
    return model, timed.own


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedGraphs:
    """Synthetic graphs as points, the run's own by label, and what was left out and why."""

    points: tuple[LaunchPoint, ...]
    own: dict[str, OwnLaunches]
    notes: tuple[str, ...]


def time_graphs(
    builder: GraphBuilder, wanted: Sequence[Spec], own: Sequence[OwnGraph] = ()
) -> TimedGraphs:
    """Returns the launch times of graphs that take turns.

    Each launch is a `replay` call after the host has waited until the device is idle.

    Raises:
        DeviceError: A graph is not what was asked for, or a call failed.
    """
    clock = CudaClock()
    deadline_ns = clock.read_ns() + _BUDGET_NS
    with gc_paused():
        cycles_per_ns = _cycles_per_ns(clock)
        series, notes = _build(builder, wanted, clock, cycles_per_ns, deadline_ns)
        own_series = {one.label: _Series(one.recording, clock, 0, one.prepare) for one in own}
        for one in own_series.values():
            one.probe()
        for _ in range(_PASSES):
            for one in (*(one for _, one in series), *own_series.values()):
                if clock.read_ns() < deadline_ns:
                    one.run_pass()
        clock.synchronize()
    late = [_named(spec) for spec, one in series if not one.has_samples]
    late += [label for label, one in own_series.items() if not one.has_samples]
    notes += [f"left out, the time was up: {', '.join(late)}"] if late else []
    return TimedGraphs(
        points=tuple(_point(spec, one) for spec, one in series if one.has_samples),
        own={label: one.launches() for label, one in own_series.items() if one.has_samples},
        notes=tuple(notes),
    )


def _build(
    builder: GraphBuilder,
    wanted: Sequence[Spec],
    clock: CudaClock,
    cycles_per_ns: float,
    deadline_ns: int,
) -> tuple[list[tuple[Spec, _Series]], list[str]]:
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
        one = _Series(graphs[key], clock, round(spec.busy_ns * cycles_per_ns))
        series.append((spec, one))
        launch_ns = one.probe()
        if launch_ns > _DEAR_NS:
            dear[spec.kind, spec.busy_ns] = launch_ns
    return series, notes


class _Series:
    """The launches of one graph, and how long the host waited before each."""

    def __init__(
        self,
        recording: Recording,
        clock: CudaClock,
        busy_cycles: int,
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        self._recording = recording
        self._prepare = prepare
        self._clock = clock
        self._busy_cycles = busy_cycles
        self._launches, self._waits = array("q"), array("q")
        self._launches_a_pass = _LEAST_LAUNCHES

    @property
    def has_samples(self) -> bool:
        """Whether a pass was timed."""
        return bool(self._launches)

    def probe(self) -> int:
        """Returns the second launch's time, and settles how many fit into a pass."""
        self._prepare()
        self._launch()
        waited_ns, launch_ns = self._launch()
        fitting = _PASS_NS // max(waited_ns + launch_ns, 1)
        self._launches_a_pass = min(max(fitting, _LEAST_LAUNCHES), _MOST_LAUNCHES)
        return launch_ns

    def run_pass(self) -> None:
        """Times some launches, after a few that are thrown away."""
        self._prepare()
        for _ in range(_WARMUP_LAUNCHES):
            self._launch()
        for _ in range(self._launches_a_pass):
            waited_ns, launch_ns = self._launch()
            self._waits.append(waited_ns)
            self._launches.append(launch_ns)

    def launches(self) -> OwnLaunches:
        """Returns the summary of all passes."""
        return OwnLaunches(
            stats=launch_stats(np.array(self._launches, np.int64), "count"),
            waited_ns=median(np.array(self._waits, np.int64)),
        )

    def _launch(self) -> tuple[int, int]:
        """Waits for the launch before, and for a busy device where the series asks for one."""
        clock, replay = self._clock, self._recording.replay
        if self._busy_cycles:
            torch.cuda._sleep(self._busy_cycles)
        begun_ns = clock.read_ns()
        clock.synchronize()
        idle_ns = clock.read_ns()
        replay()
        return idle_ns - begun_ns, clock.read_ns() - idle_ns


def _point(spec: Spec, series: _Series) -> LaunchPoint:
    found = series.launches()
    return LaunchPoint(
        kind=spec.kind,
        counts=spec.in_graph,
        median_ns=found.stats.median_ns,
        iqr_ns=found.stats.iqr_ns,
        count=found.stats.count,
        waited_ns=found.waited_ns,
    )


def _cycles_per_ns(clock: CudaClock) -> float:
    """How far the counter of a spinning kernel runs; the second spin counts."""
    span_ns = None
    for _ in range(2):
        clock.begin_span()
        torch.cuda._sleep(_CALIBRATION_CYCLES)
        clock.end_span()
        span_ns = clock.span_ns()
    if not span_ns:
        raise DeviceError("a spinning kernel took no time on the device: its clock is not usable")
    return _CALIBRATION_CYCLES / span_ns


def _named(spec: Spec) -> str:
    size = spec.counts.get(spec.kind, 0)
    busy = f" after {format_ns(spec.busy_ns)} of work" if spec.busy_ns else ""
    return f"{size} x {spec.kind}{busy}"
