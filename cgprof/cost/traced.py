"""A labelled pass over all graphs under CUPTI: what cudaGraphLaunch takes, seen from outside.

Our clock runs around the same calls, so that the two can be compared. Run it after all timing:
with CUPTI attached a launch takes longer by each node, and the process keeps that when it is gone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cgprof.cost.cupti import Interval, graph_launches
from cgprof.cost.replay_cost import patient, ready_graph
from cgprof.graphs.cuda import gc_paused
from cgprof.measure.samples import launch_stats
from cgprof.record.cost import ReplayCost
from cgprof.record.graph import GraphRecord, LaunchStats

if TYPE_CHECKING:
    from cgprof.engine.worker import Engine

TRACED_REPLAYS = 10
_NO_DEVICE = "a CPU run launches no CUDA graph"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedLaunches:
    """The same launches by CUPTI's records and by our clock."""

    interval: LaunchStats
    wall: LaunchStats


def traced_launches(
    engine: Engine, records: Sequence[GraphRecord], samples: int = TRACED_REPLAYS
) -> dict[str, TracedLaunches] | str:
    """Returns by label the launches under CUPTI, device idle before; or why there are none.

    One more replay a key comes first and is thrown away. Ranks call it together.

    Raises:
        ReplayError: A key cannot be replayed.
    """
    if engine.recorder.kind != "cuda":
        return _NO_DEVICE
    ready = [record for record in records if record.failure is None]
    calls: list[Interval] = []
    with graph_launches() as trace:
        # Another rank may well have CUPTI, and its replays need this rank's.
        if trace.problem and not engine.runner.has_peers:
            return trace.problem
        for record in ready:
            with patient(engine, record.key), gc_paused():
                graph = ready_graph(engine, record.key)
                for _ in range(samples + 1):
                    engine.synchronize()
                    begun_ns = time.perf_counter_ns()
                    engine.graphs.replay(graph)
                    calls.append((begun_ns, time.perf_counter_ns()))
                engine.synchronize()
    if trace.problem:
        return trace.problem
    return by_label([record.label for record in ready], trace.intervals, calls, samples)


def by_label(
    labels: Sequence[str], intervals: Sequence[Interval], calls: Sequence[Interval], samples: int
) -> dict[str, TracedLaunches] | str:
    """Returns each label's launches, `samples` + 1 in a row of which the first does not count.

    Intervals are told in our nanoseconds, by the pace at which CUPTI's clock and ours went from
    the first call to the last: a profiler that ran earlier in this process may have given CUPTI
    a clock of its own, as torch's does with the processor's cycles.
    """
    each = samples + 1
    if len(intervals) != each * len(labels):
        return f"CUPTI recorded {len(intervals)} of {each * len(labels)} launches"
    if not labels:
        return {}
    traced, ours = np.array(intervals, np.int64), np.array(calls, np.int64)
    spans = [int(times[-1, 0] - times[0, 0]) for times in (traced, ours)]
    if min(spans) <= 0:
        return "CUPTI's clock stood still between launches"
    inside = np.rint((traced[:, 1] - traced[:, 0]) * (spans[1] / spans[0])).astype(np.int64)
    around = ours[:, 1] - ours[:, 0]
    series = (times.reshape(len(labels), each)[:, 1:] for times in (inside, around))
    return {
        label: TracedLaunches(
            interval=launch_stats(interval, "count"), wall=launch_stats(wall, "count")
        )
        for label, interval, wall in zip(labels, *series, strict=True)
    }


def with_traced(
    costs: Mapping[str, ReplayCost], traced: Mapping[str, TracedLaunches] | str
) -> dict[str, ReplayCost]:
    """Returns the costs with what the pass saw of each key, or why there is nothing."""
    if isinstance(traced, str):
        return {
            label: cost.model_copy(update={"traced_note": traced}) for label, cost in costs.items()
        }
    done = {}
    for label, cost in costs.items():
        found = traced.get(label)
        update = {
            "traced": found.interval if found else None,
            "traced_wall": found.wall if found else None,
            "traced_note": "",
        }
        done[label] = cost.model_copy(update=update)
    return done
