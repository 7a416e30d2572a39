"""What a run learns of its graphs beside the times of steps: what launching costs, what is inside.

The order is fixed: times first, then the nodes, whose reading takes the driver's lock, then what
traces, which slows every later launch of the process; what traces every node comes last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from cgprof.cost.contents import read_contents
from cgprof.cost.launch_prediction import with_predictions
from cgprof.cost.replay_cost import ready_graph, replay_costs
from cgprof.cost.synthetic import OwnGraph, OwnLaunches, measure_launch_model
from cgprof.cost.timeline import Timelines, trace_replays
from cgprof.cost.traced import traced_launches, with_traced
from cgprof.errors import DeviceError
from cgprof.graphs.chosen import choose_keys
from cgprof.measure.clock import Clock
from cgprof.measure.progress import Progress
from cgprof.record.contents import GraphContents
from cgprof.record.cost import LaunchModel, ReplayCost
from cgprof.record.graph import GraphRecord
from cgprof.record.nodes import NodeTable
from cgprof.record.samples import SampleSink

if TYPE_CHECKING:
    from cgprof.engine.worker import Engine


_NOT_BESIDE = (
    "launch model: none of the run's graphs took turns with the synthetic ones, since ranks must "
    "replay equally often"
)
_BESIDE_MODEL = 8  # graphs of the run that take turns with the synthetic ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Insight:
    """Contents and costs by label of the key; `notes` say what is missing and why."""

    nodes: NodeTable | None = None
    contents: dict[str, GraphContents] = field(default_factory=dict)
    replay_costs: dict[str, ReplayCost] = field(default_factory=dict)
    launch_model: LaunchModel | None = None
    timelines: Timelines = field(default_factory=Timelines)
    notes: tuple[str, ...] = ()


def look_inside(
    engine: Engine,
    records: Sequence[GraphRecord],
    clock: Clock,
    sink: SampleSink,
    progress: Progress,
) -> Iterator[Insight]:
    """Measures and reads every captured key, and yields what is known so far after each part.

    All ranks call it together.

    Raises:
        CgprofError: A replay is refused, another rank is lost, or the driver fails.
    """
    config, on_device = engine.config.measure, engine.recorder.kind == "cuda"
    costs: dict[str, ReplayCost] = {}
    if config.replay_samples:
        progress.stage("replay call alone", sum(record.failure is None for record in records))
        costs = replay_costs(engine, records, clock, sink, lambda key: progress.step(str(key)))
        yield Insight(replay_costs=costs)
    modelled: tuple[LaunchModel, dict[str, OwnLaunches]] | None = None
    notes: tuple[str, ...] = ()
    if on_device and config.launch_model:
        progress.say("launch model from synthetic graphs")
        modelled, notes = _launch_model(engine)
    model, own = modelled or (None, {})
    costs = with_own(costs, own)
    found = Insight(replay_costs=costs, launch_model=model, notes=notes)
    yield found
    contents, nodes = read_contents(engine, records)
    if model is not None:
        costs = with_predictions(model, costs, records, contents)
    found = replace(found, nodes=nodes, contents=contents, replay_costs=costs)
    yield found
    if on_device and config.trace_launches and costs:
        progress.say("launches under CUPTI")
        found = replace(found, replay_costs=with_traced(costs, traced_launches(engine, records)))
        yield found
    if on_device and config.timelines:
        progress.say("timelines of single replays")
        yield replace(found, timelines=trace_replays(engine, records, contents))


def with_own(
    costs: Mapping[str, ReplayCost], own: Mapping[str, OwnLaunches]
) -> dict[str, ReplayCost]:
    """Returns the costs with the launches that took turns with the synthetic graphs."""
    done = dict(costs)
    for label in costs.keys() & own.keys():
        found = own[label]
        facts = {
            "beside": found.warm,
            "after_wait": found.after_wait,
            "waited_ns": found.waited_ns,
            "wait_adds": found.wait_adds,
            "slow_adds": found.slow_adds,
        }
        done[label] = costs[label].model_copy(update=facts)
    return done


def _launch_model(
    engine: Engine,
) -> tuple[tuple[LaunchModel, dict[str, OwnLaunches]] | None, tuple[str, ...]]:
    """The model, with some of the run's graphs timed beside it, or why there is none."""
    keys = () if engine.runner.has_peers else choose_keys(engine.graphs.keys, _BESIDE_MODEL)
    own = [
        OwnGraph(
            label=str(key),
            recording=engine.graphs.captured[key].recording,
            prepare=partial(ready_graph, engine, key),
        )
        for key in keys
    ]
    notes = (_NOT_BESIDE,) if engine.runner.has_peers else ()
    try:
        return measure_launch_model(engine.device, engine.config.seed, own), notes
    except DeviceError as error:
        return None, (f"no launch model: {error}",)
