"""What one replay call costs by itself, without the step around it: idle queue and busy queue.

Host time and the calling thread's CPU time come from separate calls, taken alternately, so that
reading one clock does not disturb the other.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from cgprof.config.schema import All2AllBackend
from cgprof.graphs.cuda import gc_paused
from cgprof.measure.clock import Clock
from cgprof.measure.samples import launch_stats
from cgprof.record.cost import ReplayCost
from cgprof.record.graph import GraphRecord
from cgprof.record.samples import LAUNCH_CPU_COLUMN, Phase, SampleSink
from cgprof.shapes import GraphKey
from cgprof.stats.quantiles import IntSamples

if TYPE_CHECKING:
    from cgprof.engine.worker import Engine
    from cgprof.graphs.manager import CapturedGraph

_BUDGET_NS = 300_000_000  # for one key, unless that leaves too few rounds
_LEAST_ROUNDS = 5
# Of several ranks, which must replay equally often whatever time each of them sees.
_ROUNDS_OF_RANKS = 10
_NO_QUEUE = "a CPU has done the work when the call returns"
_NO_MIXING = (
    "graphs share a communicator without NCCL's graph mixing: no second replay may be enqueued "
    "before the first is done (--nccl-graph-mixing allows it)"
)


def replay_costs(
    engine: Engine,
    records: Sequence[GraphRecord],
    clock: Clock,
    samples: SampleSink,
    progress: Callable[[GraphKey], None] = lambda key: None,
) -> dict[str, ReplayCost]:
    """Returns by label what replaying each captured key costs, on inputs that are prepared once.

    Ranks call it together. Series of an earlier process in `samples` are replaced.

    Raises:
        ReplayError: A key cannot be replayed.
    """
    wanted = engine.config.measure.replay_samples
    if not wanted:
        return {}
    samples.keep(lambda _, phase: phase not in ("idle", "busy"))
    busy_note = _why_not_busy(engine)
    costs = {}
    for record in records:
        if record.failure is not None:
            continue
        progress(record.key)
        with patient(engine, record.key), gc_paused():
            graph = ready_graph(engine, record.key)
            rounds = _Rounds(partial(engine.graphs.replay, graph), clock, busy=not busy_note)
            stopped_by = _run(engine, rounds, clock, wanted)
        for phase, columns in rounds.columns().items():
            samples.append(record.label, phase, columns)
        costs[record.label] = rounds.cost(stopped_by, busy_note)
    return costs


def ready_graph(engine: Engine, key: GraphKey) -> CapturedGraph:
    """Returns a key's graph with a full step of it in the buffers, which replays leave as it is.

    Raises:
        ReplayError: It cannot be replayed.
    """
    prepared = engine.runner.prepare(engine.live_step(key), engine.decision_for(key))
    assert prepared.graph is not None  # captured keys replay
    return prepared.graph


def patient(engine: Engine, key: GraphKey) -> AbstractContextManager[None]:
    """Bounds a block of replays that no step watches, where other ranks take part in them."""
    return nullcontext() if engine.peers is None else engine.peers.patient(f"replays of {key}")


def _why_not_busy(engine: Engine) -> str:
    if engine.recorder.kind != "cuda":
        return _NO_QUEUE
    parallel = engine.config.parallel
    by_nccl = parallel.all2all_backend is not All2AllBackend.SYMMETRIC_MEMORY
    shared = engine.runner.has_peers and by_nccl and not parallel.nccl_graph_mixing
    return _NO_MIXING if shared else ""


def _run(engine: Engine, rounds: _Rounds, clock: Clock, wanted: int) -> str:
    """Runs the rounds and returns what ended them; the first, thrown away, says how many fit."""
    clock.synchronize()
    begun_ns = clock.read_ns()
    rounds.run()
    clock.synchronize()
    round_ns = max(clock.read_ns() - begun_ns, 1)
    rounds.forget()
    if engine.runner.has_peers:
        count = min(wanted, _ROUNDS_OF_RANKS)
    else:
        count = min(wanted, max(_LEAST_ROUNDS, _BUDGET_NS // round_ns))
    for _ in range(count):
        rounds.run()
    clock.synchronize()
    return "max_seconds" if count < wanted and not engine.runner.has_peers else "count"


class _Rounds:
    """Calls of one graph: idle, idle by the CPU clock, and both of them busy."""

    def __init__(
        self,
        replay: Callable[[], object],
        clock: Clock,
        *,
        busy: bool,
        read_cpu_ns: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self._replay = replay
        self._clock = clock
        self._busy = busy
        self._reads = {"launch_ns": clock.read_ns, LAUNCH_CPU_COLUMN: read_cpu_ns}
        self._times: dict[Phase, dict[str, array[int]]] = {}
        self.forget()

    def forget(self) -> None:
        """Throws away what was timed so far."""
        phases: tuple[Phase, ...] = ("idle", "busy") if self._busy else ("idle",)
        self._times = {phase: {name: array("q") for name in self._reads} for phase in phases}

    def run(self) -> None:
        """Makes one call of each kind."""
        for phase, series in self._times.items():
            for name, read_ns in self._reads.items():
                self._clock.synchronize()
                if phase == "busy":
                    self._replay()
                series[name].append(self._timed(read_ns))

    def columns(self) -> dict[Phase, dict[str, IntSamples]]:
        """Returns the times by phase and column."""
        return {
            phase: {name: np.array(times, np.int64) for name, times in series.items()}
            for phase, series in self._times.items()
        }

    def cost(self, stopped_by: str, busy_note: str) -> ReplayCost:
        """Returns the summary."""
        stats = {
            phase: {name: launch_stats(times, stopped_by) for name, times in series.items()}
            for phase, series in self.columns().items()
        }
        busy = stats.get("busy", {})
        return ReplayCost(
            idle=stats["idle"]["launch_ns"],
            idle_cpu=stats["idle"][LAUNCH_CPU_COLUMN],
            busy=busy.get("launch_ns"),
            busy_cpu=busy.get(LAUNCH_CPU_COLUMN),
            busy_note=busy_note,
            process_id=os.getpid(),
        )

    def _timed(self, read_ns: Callable[[], int]) -> int:
        replay = self._replay
        begun_ns = read_ns()
        replay()
        return read_ns() - begun_ns
