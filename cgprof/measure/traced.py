"""A labelled pass over all graphs under CUPTI: what cudaGraphLaunch takes, seen from outside.

Run it after all timing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cgprof.graphs.cuda import gc_paused
from cgprof.measure.cupti import Interval, graph_launches
from cgprof.measure.replay_cost import patient, ready_graph
from cgprof.measure.samples import launch_stats
from cgprof.record.cost import ReplayCost
from cgprof.record.graph import GraphRecord, LaunchStats

if TYPE_CHECKING:
    from cgprof.engine.worker import Engine

TRACED_REPLAYS = 10
_NO_DEVICE = "a CPU run launches no CUDA graph"


def traced_launches(
    engine: Engine, records: Sequence[GraphRecord], samples: int = TRACED_REPLAYS
) -> dict[str, LaunchStats] | str:
    """Returns by label the host intervals of cudaGraphLaunch, device idle before; or why not.

    One more replay a key comes first and is thrown away. Ranks call it together.

    Raises:
        ReplayError: A key cannot be replayed.
    """
    if engine.recorder.kind != "cuda":
        return _NO_DEVICE
    ready = [record for record in records if record.failure is None]
    with graph_launches() as trace:
        # Another rank may well have CUPTI, and its replays need this rank's.
        if trace.problem and not engine.runner.has_peers:
            return trace.problem
        for record in ready:
            with patient(engine, record.key), gc_paused():
                graph = ready_graph(engine, record.key)
                for _ in range(samples + 1):
                    engine.synchronize()
                    engine.graphs.replay(graph)
                engine.synchronize()
    if trace.problem:
        return trace.problem
    return by_label([record.label for record in ready], trace.intervals, samples)


def by_label(
    labels: Sequence[str], intervals: Sequence[Interval], samples: int
) -> dict[str, LaunchStats] | str:
    """Returns each label's launches, `samples` + 1 in a row of which the first does not count."""
    each = samples + 1
    if len(intervals) != each * len(labels):
        return f"CUPTI recorded {len(intervals)} of {each * len(labels)} launches"
    times = np.array([end - begin for begin, end in intervals], np.int64)
    return {
        label: launch_stats(series[1:], "count")
        for label, series in zip(labels, times.reshape(len(labels), each), strict=True)
    }


def with_traced(
    costs: Mapping[str, ReplayCost], traced: Mapping[str, LaunchStats] | str
) -> dict[str, ReplayCost]:
    """Returns the costs with what the pass saw of each key, or why there is nothing."""
    if isinstance(traced, str):
        return {
            label: cost.model_copy(update={"traced_note": traced}) for label, cost in costs.items()
        }
    return {
        label: cost.model_copy(update={"traced": traced.get(label), "traced_note": ""})
        for label, cost in costs.items()
    }
