"""What a step enqueues beside its graph: inputs before it, logits and sampling after it.

The latter two may be one launch of another graph.

The counts are those of torch's profiler, whose tracing slows launches: run it after all timing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch.profiler import record_function, supported_activities

from cgprof.measure.torch_trace import torch_trace
from cgprof.record.graph import GraphRecord
from cgprof.shapes import GraphKey

if TYPE_CHECKING:
    from cgprof.engine.worker import Engine

GRAPH = "graph"
# Source: names of the calls of the CUDA runtime and driver API as CUPTI reports them.
_CALLS = (
    ("cudaGraphLaunch", GRAPH),
    ("cuGraphLaunch", GRAPH),
    ("cudaLaunchKernel", "kernel"),
    ("cudaLaunchCooperativeKernel", "kernel"),
    ("cuLaunchKernel", "kernel"),
    ("cuLaunchCooperativeKernel", "kernel"),
    ("cudaMemcpy", "memcpy"),
    ("cuMemcpy", "memcpy"),
    ("cudaMemset", "memset"),
    ("cuMemset", "memset"),
)
_MARK = "cgprof step "


def count_outside(engine: Engine, records: Sequence[GraphRecord]) -> list[GraphRecord]:
    """Returns the records with what a step of each key enqueues beside its graph; CUDA only.

    Traces one step a key. Times taken in this process afterwards may be longer.
    """
    ready = [record for record in records if record.failure is None]
    if engine.recorder.kind != "cuda" or not ready:
        return list(records)

    def run(key: GraphKey) -> Callable[[], None]:
        step, decision = engine.live_step(key), engine.decision_for(key)

        def once() -> None:
            prepared = engine.runner.prepare(step, decision)
            engine.runner.finish(prepared, engine.runner.launch(prepared)).wait()

        return once

    traced = trace_launches([run(record.key) for record in ready])
    by_key = {record.key: calls for record, calls in zip(ready, traced, strict=True)}
    return [
        record.model_copy(
            update={
                "launches_outside": _beside_its_graph(by_key[record.key]),
                "replays": engine.graphs.captured[record.key].replays,
            }
        )
        if record.failure is None
        else record
        for record in records
    ]


def _beside_its_graph(calls: Mapping[str, int]) -> dict[str, int]:
    others = {kind: count - (kind == GRAPH) for kind, count in calls.items()}
    return {kind: count for kind, count in others.items() if count}


def count_launches(names: Iterable[str]) -> dict[str, int]:
    """Returns how many of the API calls of these names enqueue work, by kind of work."""
    kinds = (kind for name in names for prefix, kind in _CALLS if name.startswith(prefix))
    return dict(sorted(Counter(kinds).items()))


def trace_launches(steps: Sequence[Callable[[], None]]) -> list[dict[str, int]]:
    """Runs each step once under the profiler and returns what each enqueued; nothing on a CPU.

    A step has to wait for its own end.
    """
    with torch_trace(supported_activities()) as trace:
        for index, step in enumerate(steps):
            with record_function(f"{_MARK}{index}"):
                step()
    found: list[dict[str, int]] = [{} for _ in steps]
    events = [event for event in trace.events() or () if event.time_range is not None]
    calls = [event for event in events if event.name.startswith("cu")]
    for mark in events:
        if not mark.name.startswith(_MARK) or mark.device_type.name != "CPU":
            continue
        start, end = mark.time_range.start, mark.time_range.end
        inside = (call.name for call in calls if start <= call.time_range.start <= end)
        found[int(mark.name.removeprefix(_MARK))] = count_launches(inside)
    return found
