"""What a run learns of its graphs beside the times of steps: what launching costs, what is inside.

The order is fixed: times first, then the nodes, whose reading takes the driver's lock, then what
traces, which slows every later launch of the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cgprof.errors import DeviceError
from cgprof.measure.clock import Clock
from cgprof.measure.contents import read_contents
from cgprof.measure.launch_prediction import with_predictions
from cgprof.measure.progress import Progress
from cgprof.measure.replay_cost import replay_costs
from cgprof.measure.traced import traced_launches, with_traced
from cgprof.record.contents import GraphContents
from cgprof.record.cost import LaunchModel, ReplayCost
from cgprof.record.graph import GraphRecord
from cgprof.record.nodes import NodeTable
from cgprof.record.samples import SampleSink

if TYPE_CHECKING:
    from cgprof.engine.worker import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Insight:
    """Contents and costs by label of the key; `notes` say what is missing and why."""

    nodes: NodeTable
    contents: dict[str, GraphContents]
    replay_costs: dict[str, ReplayCost]
    launch_model: LaunchModel | None
    notes: tuple[str, ...] = ()


def look_inside(
    engine: Engine,
    records: Sequence[GraphRecord],
    clock: Clock,
    sink: SampleSink,
    progress: Progress,
) -> Insight:
    """Measures and reads every captured key; all ranks call it together.

    Raises:
        CgprofError: A replay is refused, another rank is lost, or the driver fails.
    """
    config, on_device = engine.config.measure, engine.recorder.kind == "cuda"
    costs: dict[str, ReplayCost] = {}
    if config.replay_samples:
        progress.stage("replay call alone", sum(record.failure is None for record in records))
        costs = replay_costs(engine, records, clock, sink, lambda key: progress.step(str(key)))
    model, notes = None, []
    if on_device and config.launch_model:
        progress.say("launch model from synthetic graphs")
        model, problem = _launch_model(engine)
        notes += [problem] if problem else []
    contents, nodes = read_contents(engine, records)
    if model is not None:
        costs = with_predictions(model, costs, records, contents)
    if on_device and config.trace_launches and costs:
        progress.say("launches under CUPTI")
        costs = with_traced(costs, traced_launches(engine, records))
    return Insight(
        nodes=nodes,
        contents=contents,
        replay_costs=costs,
        launch_model=model,
        notes=tuple(notes),
    )


def _launch_model(engine: Engine) -> tuple[LaunchModel | None, str]:
    from cgprof.measure.synthetic import measure_launch_model

    try:
        return measure_launch_model(engine.device, engine.config.seed), ""
    except DeviceError as error:
        return None, f"no launch model: {error}"
