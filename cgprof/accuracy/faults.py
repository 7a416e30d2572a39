"""Planted faults: named, each with its place and the legs that it must turn red, as data.

A fault lives in padded steps only, those that run a captured key or its eager counterpart: the
contexts of the checks stay right, and so does the reference. Both runs of `replay-eager` and of
`greedy` share the code before the launch, the weights and the cache, hence their blindness to
faults there. The task sees every place; whether it notices is what a planted check measures.

NAME@TOKENS is the fault in the keys of that many tokens alone: a check must name just these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cgprof.accuracy.spoiling import KeyFilter, replaced, spoiled_inputs, stale_rows
from cgprof.batch.buffers import HostFields
from cgprof.engine.types import PreparedStep, Step
from cgprof.engine.worker import Engine
from cgprof.errors import ConfigError
from cgprof.shapes import GraphKey
from cgprof.units import format_ranges

REPLAY, REFERENCE, PADDING = "replay-eager", "step-reference", "poisoned-padding"
GREEDY, WEIGHTS = "greedy", "weights"
LEGS = (REPLAY, REFERENCE, PADDING, GREEDY, WEIGHTS)
OF_ONE_KEY = frozenset({REPLAY, REFERENCE, PADDING})


def every_key(key: GraphKey) -> bool:
    """Hits all keys."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault and what is stated of it beforehand; legs in neither set may go either way."""

    name: str
    place: str
    what: str
    red: frozenset[str]
    green: frozenset[str]
    plant: Callable[[Engine, KeyFilter], AbstractContextManager[None]]
    needs_twin: bool = False
    spares_keys: bool = True  # whether it can be in some keys and not in others
    num_tokens: int | None = None  # of the keys that it is in; None: all

    def at(self, num_tokens: int) -> Fault:
        """Returns the fault in the keys of one size; a greedy run may never meet that size.

        Raises:
            ConfigError: It cannot be in one size alone.
        """
        if not self.spares_keys:
            raise ConfigError("--plant", f"{self.name} is in what all keys share; leave @ out")
        return dataclasses.replace(
            self,
            name=f"{self.name}@{num_tokens}",
            what=f"{self.what}, in keys of {num_tokens} tokens only",
            red=self.red & OF_ONE_KEY,
            num_tokens=num_tokens,
        )

    def hits(self, key: GraphKey) -> bool:
        """Whether the fault is in this key."""
        return self.num_tokens is None or key.num_tokens == self.num_tokens


def find_fault(name: str) -> Fault:
    """Returns the fault of that name, NAME@TOKENS for keys of one size.

    Raises:
        ConfigError: There is none, or it cannot be in one size alone.
    """
    bare, at, size = name.partition("@")
    fault = FAULTS.get(bare)
    if fault is None:
        raise ConfigError("--plant", f"no fault is called {bare!r}; there are {', '.join(FAULTS)}")
    if not at:
        return fault
    if not size.isdecimal():
        raise ConfigError("--plant", f"{size!r} is no number of tokens; write {bare}@8")
    return fault.at(int(size))


def check_keys(fault: Fault, keys: Sequence[GraphKey]) -> None:
    """Checks that at least one of the captured keys can have the fault.

    Raises:
        ConfigError: None has its size, or none is a twin where it needs one.
    """
    hit = [key for key in keys if fault.hits(key)]
    if fault.num_tokens is not None and not hit:
        sizes = format_ranges(sorted({key.num_tokens for key in keys})) or "none"
        raise ConfigError("--plant", f"{fault.name}: the captured sizes are {sizes}")
    if fault.needs_twin and not any(key.is_twin for key in hit):
        raise ConfigError("--plant", f"{fault.name} needs a twin, none is captured; add --dbo")


@contextmanager
def planted(engine: Engine, fault: Fault) -> Iterator[None]:
    """Makes the engine faulty; live requests are removed before and after.

    Raises:
        ConfigError: No captured key can have the fault.
    """
    check_keys(fault, engine.graphs.keys)
    engine.live.clear()
    try:
        with fault.plant(engine, fault.hits):
            yield
    finally:
        engine.live.clear()


def stale_output(engine: Engine, hits: KeyFilter = every_key) -> AbstractContextManager[None]:
    """Every replay leaves what the replay before it produced."""
    return stale_rows(engine, hits, lambda key: slice(0, key.num_tokens))


def stale_twin_half(
    engine: Engine, hits: KeyFilter = every_key, *, index: int = -1
) -> AbstractContextManager[None]:
    """One microbatch of every twin leaves what the replay before it produced; by default the last.

    The rows are cut where the padded batch is.
    """

    def rows(key: GraphKey) -> slice:
        if not key.is_twin:
            return slice(0, 0)
        size = -(-key.num_tokens // key.num_microbatches)
        start = range(key.num_microbatches)[index] * size
        return slice(start, min(start + size, key.num_tokens))

    return stale_rows(engine, hits, rows)


def shifted_positions(engine: Engine, hits: KeyFilter = every_key) -> AbstractContextManager[None]:
    """Positions of real tokens are one too high."""
    last = engine.config.limits.max_model_len - 1

    def shift(host: HostFields, step: Step, key: GraphKey) -> None:
        positions = host.positions[: step.shape.num_tokens]
        np.minimum(positions + 1, last, out=positions)

    return spoiled_inputs(engine, hits, shift)


def stale_block_table(engine: Engine, hits: KeyFilter = every_key) -> AbstractContextManager[None]:
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

    return spoiled_inputs(engine, hits, keep)


def writing_padding(engine: Engine, hits: KeyFilter = every_key) -> AbstractContextManager[None]:
    """Padding rows have the last slot of the cache where -1 says to write nothing."""
    last = engine.pool.num_blocks * engine.config.limits.block_size - 1

    def write(host: HostFields, step: Step, key: GraphKey) -> None:
        host.slot_mapping[step.shape.num_tokens : key.num_tokens] = last

    return spoiled_inputs(engine, hits, write)


@contextmanager
def swapped_rows(engine: Engine, hits: KeyFilter = every_key) -> Iterator[None]:
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
def overwritten_kv_row(engine: Engine, hits: KeyFilter = every_key) -> Iterator[None]:
    """Before each step the keys and values of the first request's first token become ones."""
    launch = engine.runner.launch

    def overwrite_and_launch(prepared: PreparedStep, *, count: bool = True) -> torch.Tensor:
        if prepared.decision.key.num_reqs is not None:
            block = int(engine.block_table.array[prepared.step.rows[0], 0])
            engine.kv_cache[:, block, :, 0] = 1
        return launch(prepared, count=count)

    with replaced(engine.runner, "launch", overwrite_and_launch):
        yield


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
            spares_keys=False,
        ),
        Fault(
            name="overwritten-kv-row",
            place="kv",
            what="keys and values of the first request's first token become ones before each step",
            red=frozenset({REFERENCE}),
            green=frozenset({REPLAY, PADDING, GREEDY, WEIGHTS}),
            plant=overwritten_kv_row,
            spares_keys=False,
        ),
    )
}
