"""Times the launches of synthetic graphs, and fits the launch model to them. CUDA only.

Run it after all that reads memory: the driver keeps what the graphs took for later ones.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence

import numpy as np
import torch

from cgprof.errors import DeviceError
from cgprof.graphs.cuda import CudaRecording, gc_paused
from cgprof.measure.clock import CudaClock
from cgprof.measure.launch_model import fit
from cgprof.measure.synthetic_graphs import GraphBuilder, graph_builder
from cgprof.measure.synthetic_layout import Spec, specs
from cgprof.record.cost import LaunchModel, LaunchPoint, NodeKind
from cgprof.stats.quantiles import interquartile_range, median
from cgprof.units import format_ns

_BUDGET_NS = 12_000_000_000  # building and timing; what is not timed by then is left out
_PASSES = 3  # over all graphs, so that a burst of noise spoils a part of each series only
_PASS_NS = 120_000_000  # of one graph in one pass, unless that leaves too few launches
_LEAST_LAUNCHES, _MOST_LAUNCHES, _WARMUP_LAUNCHES = 10, 20, 2  # in one pass
_DEAR_NS = 20_000_000  # a series stops growing when one launch takes so long
_CALIBRATION_CYCLES = 10_000_000


def measure_launch_model(device: torch.device, seed: int) -> LaunchModel:
    """Returns the launch model of a device, fitted to synthetic graphs; takes about ten seconds.

    The device must be idle. A second device that can be reached is used for copies to a peer.

    Raises:
        DeviceError: A graph is not what was asked for, a call failed, or too little was measured.
    """
    with graph_builder(device) as builder:
        points, notes = time_graphs(builder, specs(with_peer=builder.has_peer))
        notes = (*builder.notes, *notes)
    return fit(points, seed).model_copy(update={"notes": notes, "process_id": os.getpid()})


def time_graphs(
    builder: GraphBuilder, wanted: Sequence[Spec]
) -> tuple[tuple[LaunchPoint, ...], tuple[str, ...]]:
    """Returns the launch times of graphs, and what was left out and why.

    Each launch is a `replay` call after the host has waited until the device is idle.

    Raises:
        DeviceError: A graph is not what was asked for, or a call failed.
    """
    clock = CudaClock()
    deadline_ns = clock.read_ns() + _BUDGET_NS
    with gc_paused():
        cycles_per_ns = _cycles_per_ns(clock)
        series, notes = _build(builder, wanted, clock, cycles_per_ns, deadline_ns)
        for _ in range(_PASSES):
            for one in series:
                if clock.read_ns() < deadline_ns:
                    one.run_pass()
        clock.synchronize()
    points = tuple(one.point() for one in series if one.has_samples)
    late = [_named(one.spec) for one in series if not one.has_samples]
    notes += [f"left out, the time was up: {', '.join(late)}"] if late else []
    return points, tuple(notes)


def _build(
    builder: GraphBuilder,
    wanted: Sequence[Spec],
    clock: CudaClock,
    cycles_per_ns: float,
    deadline_ns: int,
) -> tuple[list[_Series], list[str]]:
    """Builds each graph once and launches each series once; one kind stops where it is too dear."""
    graphs: dict[tuple[tuple[NodeKind, int], ...], CudaRecording] = {}
    dear: dict[NodeKind, int] = {}
    series, notes = [], []
    for spec in wanted:
        if spec.kind in dear:
            took = format_ns(dear[spec.kind])
            notes.append(f"left out, a launch with fewer took {took}: {_named(spec)}")
            continue
        if clock.read_ns() > deadline_ns:
            notes.append(f"left out, the time was up: {_named(spec)}")
            continue
        key = tuple(sorted(spec.counts.items()))
        if key not in graphs:
            graphs[key] = builder.build(spec)
        one = _Series(spec, graphs[key], clock, round(spec.busy_ns * cycles_per_ns))
        series.append(one)
        launch_ns = one.probe()
        if launch_ns > _DEAR_NS:
            dear[spec.kind] = launch_ns
    return series, notes


class _Series:
    """The launches of one graph, and how long the host waited before each."""

    def __init__(
        self, spec: Spec, recording: CudaRecording, clock: CudaClock, busy_cycles: int
    ) -> None:
        self.spec = spec
        self._recording = recording
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
        self._launch()
        waited_ns, launch_ns = self._launch()
        fitting = _PASS_NS // max(waited_ns + launch_ns, 1)
        self._launches_a_pass = min(max(fitting, _LEAST_LAUNCHES), _MOST_LAUNCHES)
        return launch_ns

    def run_pass(self) -> None:
        """Times some launches, after a few that are thrown away."""
        for _ in range(_WARMUP_LAUNCHES):
            self._launch()
        for _ in range(self._launches_a_pass):
            waited_ns, launch_ns = self._launch()
            self._waits.append(waited_ns)
            self._launches.append(launch_ns)

    def point(self) -> LaunchPoint:
        """Returns the summary of all passes."""
        launches = np.array(self._launches, np.int64)
        return LaunchPoint(
            kind=self.spec.kind,
            counts=self.spec.in_graph,
            median_ns=median(launches),
            iqr_ns=interquartile_range(launches),
            count=launches.size,
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
