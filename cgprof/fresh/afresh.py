"""What fresh processes find out about a run's graphs once its engine has let go of the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cgprof.config.schema import ModelConfig, RunConfig
from cgprof.fresh.eager_work import compare_work
from cgprof.fresh.node_model import fit
from cgprof.fresh.start import FreshTask, measure_alone, run_fresh
from cgprof.graphs.chosen import choose_keys
from cgprof.record.alone import NodeModel, StandAlone
from cgprof.record.contents import GraphContents, WorkDifference
from cgprof.shapes import GraphKey

_ENGINE_S = 300.0  # a process builds its engine, weights and all
_STEP_S = 5.0  # and runs and traces a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Afresh:
    """Graphs alone, the model of the others, and each graph's work against an eager step's."""

    stand_alone: tuple[StandAlone, ...] = ()
    node_model: NodeModel | None = None
    against_eager: dict[str, WorkDifference] | None = None
    notes: tuple[str, ...] = ()


def measure_afresh(
    run: RunConfig,
    model: ModelConfig,
    keys: Sequence[GraphKey],
    contents: Mapping[str, GraphContents],
    say: Callable[[str], None],
) -> Afresh:
    """Runs one process after another; what fails in one is told and ends nothing.

    Args:
        run: As the run had it.
        model: The run's model.
        keys: The captured ones.
        contents: Of their graphs, by label.
        say: Hears of each process before it starts.
    """
    alone = []
    for key in choose_keys(keys, run.measure.stand_alone_keys):
        say(f"alone in a fresh process: {key}")
        alone.append(measure_alone(run, model, key, timeout_s=_ENGINE_S))
    node_model, problem = fit(alone) if alone else (None, "")
    work = None
    if run.measure.eager_work and keys:
        say(f"eager work of {len(keys)} keys in a fresh process")
        task = FreshTask(kind="eager-work", run=run, model=model, keys=tuple(keys))
        answer = run_fresh(task, timeout_s=_ENGINE_S + _STEP_S * len(keys))
        work = compare_work(contents, answer)
    return Afresh(
        stand_alone=tuple(alone),
        node_model=node_model,
        against_eager=work,
        notes=(problem,) if problem else (),
    )
