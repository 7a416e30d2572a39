"""Planted faults: named, each with its place and the legs that it must turn red, as data.

A fault lives in padded steps only, those that run a captured key or its eager counterpart: the
contexts of the checks stay right, and so does the reference. Both runs of `replay-eager` and of
`greedy` share the code before the launch, the weights and the cache, hence their blindness to
faults there. The task sees every place; whether it notices is what a planted check measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cgprof.batch.buffers import HostFields
from cgprof.engine.step import CLEAN, PaddingFill
from cgprof.engine.types import PreparedStep, Step
from cgprof.engine.worker import Engine
from cgprof.errors import ConfigError
from cgprof.shapes import BatchShape, GraphKey, StepDecision

REPLAY, REFERENCE, PADDING = "replay-eager", "step-reference", "poisoned-padding"
GREEDY, WEIGHTS = "greedy", "weights"
LEGS = (REPLAY, REFERENCE, PADDING, GREEDY, WEIGHTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault and what is stated of it beforehand; legs in neither set may go either way."""

    name: str
    place: str
    what: str
    red: frozenset[str]
    green: frozenset[str]
    plant: Callable[[Engine], AbstractContextManager[None]]
    needs_twin: bool = False


def find_fault(name: str) -> Fault:
    """Returns the fault of that name.

    Raises:
        ConfigError: There is none.
    """
    fault = FAULTS.get(name)
    if fault is None:
        raise ConfigError("--plant", f"no fault is called {name!r}; there are {', '.join(FAULTS)}")
    return fault


@contextmanager
def planted(engine: Engine, fault: Fault) -> Iterator[None]:
    """Makes the engine faulty; live requests are removed before and after.

    Raises:
        ConfigError: The fault is in a twin and the engine has captured none.
    """
    if fault.needs_twin and not any(key.is_twin for key in engine.graphs.keys):
        raise ConfigError("--plant", f"{fault.name} needs a twin, none is captured; add --dbo")
    engine.live.clear()
    try:
        with fault.plant(engine):
            yield
    finally:
        engine.live.clear()


def stale_output(engine: Engine) -> AbstractContextManager[None]:
    """Every replay leaves what the replay before it produced."""
    return _stale_rows(engine, lambda key: slice(0, key.num_tokens))


def stale_twin_half(engine: Engine, index: int = -1) -> AbstractContextManager[None]:
    """One microbatch of every twin leaves what the replay before it produced; by default the last.

    The rows are cut where the padded batch is.
    """

    def rows(key: GraphKey) -> slice:
        if not key.is_twin:
            return slice(0, 0)
        size = -(-key.num_tokens // key.num_microbatches)
        start = range(key.num_microbatches)[index] * size
        return slice(start, min(start + size, key.num_tokens))

    return _stale_rows(engine, rows)


def shifted_positions(engine: Engine) -> AbstractContextManager[None]:
    """Positions of real tokens are one too high."""
    last = engine.config.limits.max_model_len - 1

    def shift(host: HostFields, step: Step, key: GraphKey) -> None:
        positions = host.positions[: step.shape.num_tokens]
        np.minimum(positions + 1, last, out=positions)

    return _spoiled_inputs(engine, shift)


def stale_block_table(engine: Engine) -> AbstractContextManager[None]:
    """After the batch shrinks, block tables are still those of the larger batch.

    What a request then reads past its neighbour's blocks is free, and free blocks hold NaN.
    """
    kept: list[NDArray[np.int32]] = []

    def keep(host: HostFields, step: Step, key: GraphKey) -> None:
        real = step.shape.num_reqs
        if kept and real < len(kept[0]):
            host.block_table[:real] = kept[0][:real]
        else:
            kept[:] = [host.block_table[:real].copy()]

    return _spoiled_inputs(engine, keep)


def writing_padding(engine: Engine) -> AbstractContextManager[None]:
    """Padding rows have the last slot of the cache where -1 says to write nothing."""
    last = engine.pool.num_blocks * engine.config.limits.block_size - 1

    def write(host: HostFields, step: Step, key: GraphKey) -> None:
        host.slot_mapping[step.shape.num_tokens : key.num_tokens] = last

    return _spoiled_inputs(engine, write)


@contextmanager
def swapped_rows(engine: Engine) -> Iterator[None]:
    """The rows of one down projection, an expert's if there are any, are in reverse order."""
    weight = next(
        t for name, t in engine.model.named_weights() if name.endswith("down_proj.weight")
    )
    kept = weight.clone()
    weight.copy_(kept.flip(0))
    try:
        yield
    finally:
        weight.copy_(kept)


@contextmanager
def overwritten_kv_row(engine: Engine) -> Iterator[None]:
    """Before each step the keys and values of the first request's first token become ones."""
    launch = engine.runner.launch

    def overwrite_and_launch(prepared: PreparedStep, *, count: bool = True) -> torch.Tensor:
        if prepared.decision.key.num_reqs is not None:
            block = int(engine.block_table.array[prepared.step.rows[0], 0])
            engine.kv_cache[:, block, :, 0] = 1
        return launch(prepared, count=count)

    with _replaced(engine.runner, "launch", overwrite_and_launch):
        yield


@contextmanager
def _stale_rows(engine: Engine, rows_of: Callable[[GraphKey], slice]) -> Iterator[None]:
    replay = engine.graphs.replay
    before = torch.zeros_like(engine.output)

    def replay_stale(key: GraphKey, shape: BatchShape) -> torch.Tensor:
        outputs = replay(key, shape)
        fresh = outputs.clone()
        rows = rows_of(key)
        outputs[rows] = before[rows]
        before[: key.num_tokens] = fresh
        return outputs

    with _replaced(engine.graphs, "replay", replay_stale):
        yield


@contextmanager
def _spoiled_inputs(
    engine: Engine, spoil: Callable[[HostFields, Step, GraphKey], None]
) -> Iterator[None]:
    """Lets `spoil` change the host fields of padded steps before their upload."""
    runner, buffers = engine.runner, engine.buffers
    prepare, begin, commit = runner.prepare, buffers.begin, buffers.commit
    host: list[HostFields] = []
    checked: list[tuple[Step, GraphKey]] = []

    def note_step(step: Step, decision: StepDecision, padding: PaddingFill = CLEAN) -> PreparedStep:
        checked[:] = [(step, decision.key)] if decision.key.num_reqs is not None else []
        return prepare(step, decision, padding)

    def note_slot() -> HostFields:
        host[:] = [begin()]
        return host[0]

    def spoil_and_upload(num_rows: int) -> None:
        for step, key in checked:
            spoil(host[0], step, key)
        commit(num_rows)

    with ExitStack() as stack:
        stack.enter_context(_replaced(runner, "prepare", note_step))
        stack.enter_context(_replaced(buffers, "begin", note_slot))
        stack.enter_context(_replaced(buffers, "commit", spoil_and_upload))
        yield


@contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Shadows a method of one object."""
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)


FAULTS = {
    fault.name: fault
    for fault in (
        Fault(
            name="stale-output",
            place="replay",
            what="every replay leaves what the replay before it produced",
            red=frozenset({REPLAY, REFERENCE, GREEDY}),
            green=frozenset({WEIGHTS}),
            plant=stale_output,
        ),
        Fault(
            name="stale-twin-half",
            place="replay",
            what="the last microbatch of a twin leaves what the replay before it produced",
            red=frozenset({REPLAY, REFERENCE, GREEDY}),
            green=frozenset({WEIGHTS}),
            plant=stale_twin_half,
            needs_twin=True,
        ),
        Fault(
            name="shifted-positions",
            place="prepare",
            what="positions of real tokens are one too high",
            red=frozenset({REFERENCE}),
            green=frozenset({REPLAY, PADDING, GREEDY, WEIGHTS}),
            plant=shifted_positions,
        ),
        Fault(
            name="stale-block-table",
            place="prepare",
            what="after a shrink block tables are those of the larger batch",
            red=frozenset({REFERENCE}),
            green=frozenset({WEIGHTS}),
            plant=stale_block_table,
        ),
        Fault(
            name="writing-padding",
            place="prepare",
            what="padding writes to the last slot of the cache where -1 writes nothing",
            red=frozenset({PADDING}),
            green=frozenset({REPLAY, WEIGHTS}),
            plant=writing_padding,
        ),
        Fault(
            name="swapped-rows",
            place="weights",
            what="the rows of one expert's down projection are in reverse order",
            red=frozenset({WEIGHTS}),
            green=frozenset({REPLAY, REFERENCE, PADDING, GREEDY}),
            plant=swapped_rows,
        ),
        Fault(
            name="overwritten-kv-row",
            place="kv",
            what="keys and values of the first request's first token become ones before each step",
            red=frozenset({REFERENCE}),
            green=frozenset({REPLAY, PADDING, GREEDY, WEIGHTS}),
            plant=overwritten_kv_row,
        ),
    )
}
