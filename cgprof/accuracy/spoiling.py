"""How planted faults get in: methods of one engine's parts are shadowed, and uncovered after."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from cgprof.batch.buffers import HostFields
from cgprof.engine.inputs import CLEAN, PaddingFill
from cgprof.engine.types import PreparedStep, Step
from cgprof.engine.worker import Engine
from cgprof.graphs.manager import CapturedGraph
from cgprof.shapes import GraphKey, StepDecision

KeyFilter = Callable[[GraphKey], bool]


@contextmanager
def stale_rows(
    engine: Engine, hits: KeyFilter, rows_of: Callable[[GraphKey], slice]
) -> Iterator[None]:
    """Lets the replays of keys that are hit leave rows of the replay before them."""
    replay = engine.graphs.replay
    before = torch.zeros_like(engine.output)

    def replay_stale(graph: CapturedGraph) -> torch.Tensor:
        outputs = replay(graph)
        if not hits(graph.key):
            return outputs
        fresh = outputs.clone()
        rows = rows_of(graph.key)
        outputs[rows] = before[rows]
        before[: graph.key.num_tokens] = fresh
        return outputs

    with replaced(engine.graphs, "replay", replay_stale):
        yield


@contextmanager
def spoiled_inputs(
    engine: Engine, hits: KeyFilter, spoil: Callable[[HostFields, Step, GraphKey], None]
) -> Iterator[None]:
    """Lets `spoil` change the host fields of padded steps of keys that are hit before upload."""
    runner, buffers = engine.runner, engine.buffers
    prepare, begin, commit = runner.prepare, buffers.begin, buffers.commit
    host: list[HostFields] = []
    checked: list[tuple[Step, GraphKey]] = []

    def note_step(step: Step, decision: StepDecision, padding: PaddingFill = CLEAN) -> PreparedStep:
        key = decision.key
        checked[:] = [(step, key)] if key.num_reqs is not None and hits(key) else []
        return prepare(step, decision, padding)

    def note_slot() -> HostFields:
        host[:] = [begin()]
        return host[0]

    def spoil_and_upload(num_rows: int, keep: object = None) -> None:
        for step, key in checked:
            spoil(host[0], step, key)
        commit(num_rows, keep=None if checked else keep)

    with ExitStack() as stack:
        stack.enter_context(replaced(runner, "prepare", note_step))
        stack.enter_context(replaced(buffers, "begin", note_slot))
        stack.enter_context(replaced(buffers, "commit", spoil_and_upload))
        yield


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Shadows a method of one object."""
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)
