"""What a fresh process does: capture one key alone, or run eager steps and name their kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from cgprof.config.compat import blocks_needed
from cgprof.engine.worker import Engine
from cgprof.errors import CgprofError
from cgprof.fresh.start import FreshAnswer, FreshTask
from cgprof.fresh.step_work import eager_step_work
from cgprof.graphs.plan import CapturePlan
from cgprof.measure.captures import CapturePoints, capture_keys, stream_names
from cgprof.measure.device import current_device
from cgprof.measure.memory import MemoryReader
from cgprof.record.alone import StandAlone
from cgprof.record.contents import Counts

# A capture writes a batch of padding, whose rows have no block but the reserved one; a pool of
# fewer is refused.
_BLOCKS_OF_PADDING = 2


def do(task: FreshTask) -> FreshAnswer:
    """Returns the answer to a task; an error that a user can act on is its failure."""
    try:
        if task.kind == "alone":
            return FreshAnswer(alone=_alone(task), process_id=os.getpid())
        return _eager_work(task)
    except CgprofError as error:
        return FreshAnswer(failure=str(error), process_id=os.getpid())


def _alone(task: FreshTask) -> StandAlone:
    """Warms the key up first: what libraries then keep is the process's, and in no reading."""
    (key,) = task.keys
    with _engine(task, _BLOCKS_OF_PADDING) as engine:
        engine.recorder.warm_up(engine.runner.capture_factory(key)())
        _, nvml, _ = current_device(engine.device)
        reader = MemoryReader(engine.device, nvml, stream_names(engine))
        (record,) = capture_keys(engine, reader, CapturePoints(), lambda _: None)
    return StandAlone(
        key=key,
        label=record.label,
        nodes=sum(record.nodes.values()),
        memory=record.memory,
        witness=record.witness,
        process_id=record.capture_process_id,
        warnings=record.warnings,
        failure=record.failure,
    )


def _eager_work(task: FreshTask) -> FreshAnswer:
    work: dict[str, Counts] = {}
    problems: dict[str, str] = {}
    with _engine(task, max(blocks_needed(task.run).values())) as engine:
        for key in task.keys:
            try:
                found = eager_step_work(engine, key)
            except CgprofError as error:
                problems[str(key)] = str(error)
                continue
            if isinstance(found, str):
                problems[str(key)] = found
            else:
                work[str(key)] = found
    return FreshAnswer(work=work, problems=problems, process_id=os.getpid())


@contextmanager
def _engine(task: FreshTask, num_blocks: int) -> Iterator[Engine]:
    """The run's engine with a plan of the task's keys, none captured, and a small KV cache."""
    limits = task.run.limits.model_copy(update={"num_gpu_blocks_override": num_blocks})
    alone = {"max_graph_memory_bytes": None, "finish_graphs": False}
    capture = task.run.capture.model_copy(update=alone)
    run = task.run.model_copy(update={"limits": limits, "capture": capture})
    plan = CapturePlan(keys=task.keys, skipped=(), uncovered_batches=())
    engine = Engine(run, task.model, plan)
    try:
        with engine.active():
            yield engine
    finally:
        engine.close()
