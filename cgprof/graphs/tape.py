"""TapeRecorder: records a step's operators on a CPU and replays them without its Python.

The stand-in for a CUDA graph freezes what a graph freezes: Python values, addresses and the
order of operations. It does not see work that bypasses the dispatcher (`numpy()`, `tolist()`),
nor work of a thread that did not `enter`. A collective is complete before the next operation,
in the recording as in every replay, whenever its Work is waited for.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from cgprof.errors import RecordingError
from cgprof.graphs.tape_collectives import WorkBuffers, wait_for
from cgprof.graphs.tape_memory import Arena, TapeMemory, TensorPlace
from cgprof.graphs.tape_rules import OpEffect, classify, out_overload, refusal
from cgprof.graphs.tape_values import exchange, leaves
from cgprof.graphs.topology import Node


@dataclass(frozen=True, slots=True)
class _TapeOp:
    """One operation; tensors in `args` and `kwargs` are `TensorPlace`s."""

    func: OpOverload
    args: tuple[object, ...]
    kwargs: dict[str, object]
    results: tuple[TensorPlace | None, ...]  # None: not a tensor, or an alias of an input
    storages: frozenset[int]
    effect: OpEffect


class _OpenTape:
    """The tape that threads write to while a recording is on."""

    def __init__(self) -> None:
        self.memory = TapeMemory()
        self.ops: list[_TapeOp] = []
        self.refused: str | None = None
        self._work_buffers = WorkBuffers()
        self._lock = threading.Lock()

    def run(self, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Runs one operation, a collective to its end, and writes it down.

        Raises:
            RecordingError: The operation needs the host, or is no collective that can be held.
        """
        reason = refusal(func, args, kwargs)
        if reason is not None:
            self.refused = reason
            raise RecordingError(reason)
        result = func(*args, **kwargs)
        given = [*args, *kwargs.values()]
        if func.namespace == "c10d":
            # So a step that raises before it waits leaves nothing under way.
            self._work_buffers.finish(result, given)
        elif self._work_buffers.hold(given):
            return result
        with self._lock:
            self._write_down(func, args, kwargs, result)
        return result

    def _write_down(
        self,
        func: OpOverload,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        result: object,
    ) -> None:
        inputs: set[int] = set()

        def describe_input(tensor: torch.Tensor) -> TensorPlace:
            where = self.memory.describe(tensor, is_output=False)
            inputs.add(where.storage)
            return where

        placed_args, placed_kwargs = exchange(torch.Tensor, describe_input, args, kwargs)
        outputs = [
            self.memory.describe(leaf, is_output=True) if isinstance(leaf, torch.Tensor) else None
            for leaf in leaves(result)
        ]
        tensors = [where for where in outputs if where is not None]
        fresh = tuple(
            where if where is not None and where.storage not in inputs else None
            for where in outputs
        )
        is_view = bool(tensors) and not any(fresh)
        effect = classify(func, returns_views_only=is_view)
        if effect is not OpEffect.NOTHING:
            storages = frozenset(inputs | {where.storage for where in tensors})
            self.ops.append(_TapeOp(func, placed_args, placed_kwargs, fresh, storages, effect))


class _TapeMode(TorchDispatchMode):
    """Sends every operation of the thread that entered it through the tape."""

    def __init__(self, tape: _OpenTape) -> None:
        TorchDispatchMode.__init__(self)
        self._tape = tape

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        return self._tape.run(func, args, kwargs or {})


class TapeRecording:
    """A recorded step on the CPU."""

    def __init__(self, tape: _OpenTape, arena: Arena, *, poison_dead: bool) -> None:
        self._ops = tape.ops
        self._memory = tape.memory
        self._poison_dead = poison_dead
        self._steps: list[Callable[[], object]] | None = None
        kinds = Counter(op.effect.node_kind for op in tape.ops)
        self.nodes: Mapping[str, int] = {"kernel": 0, **kinds}
        self.pool_bytes = self._memory.settle([op.storages for op in tape.ops], arena)

    @property
    def num_nodes(self) -> int:
        """Operations that a replay runs."""
        return sum(self.nodes.values())

    def instantiate(self) -> None:
        """Binds every operation to its tensors."""
        self._steps = []
        dying: dict[int, list[int]] = {}
        for number, step in {n: i for i, op in enumerate(self._ops) for n in op.storages}.items():
            dying.setdefault(step, []).append(number)
        for index, op in enumerate(self._ops):
            self._steps.append(self._bind(op))
            if self._poison_dead:
                dead = (self._memory.arena_bytes_of(number) for number in dying.get(index, ()))
                self._steps.extend(_poison(block) for block in dead if block is not None)

    def replay(self) -> None:
        """Runs the recorded operations again.

        Raises:
            RecordingError: Not instantiated, or freed.
        """
        if self._steps is None:
            raise RecordingError("the recording was freed, or never instantiated")
        with torch.inference_mode():
            for step in self._steps:
                step()

    def read_nodes(self) -> tuple[Node, ...]:
        """Returns the operators in the order in which a replay runs them."""
        return tuple(
            Node(op.effect.node_kind, op.func.name(), (index - 1,) if index else ())
            for index, op in enumerate(self._ops)
        )

    def free(self) -> None:
        """Drops the operations; the arena stays with the recorder."""
        self._steps = None
        self._ops = []
        self._memory = TapeMemory()

    def _bind(self, op: _TapeOp) -> Callable[[], object]:
        args, kwargs = exchange(TensorPlace, self._memory.tensor, op.args, op.kwargs)
        targets = [None if where is None else self._memory.tensor(where) for where in op.results]
        func = op.func
        if op.effect is OpEffect.COLLECTIVE:
            return lambda: wait_for(func(*args, **kwargs))
        if not any(target is not None for target in targets):
            return lambda: func(*args, **kwargs)
        into = out_overload(func) if all(target is not None for target in targets) else None
        if into is not None:
            writes, names = into
            kwargs = {**kwargs, **dict(zip(names, targets, strict=True))}
            return lambda: writes(*args, **kwargs)
        return lambda: _copy_into(targets, func(*args, **kwargs))


class TapeRecorder:
    """Records on the CPU. `poison_dead` fills intermediates with NaN after their last use."""

    kind: Literal["tape"] = "tape"
    capture_error_mode: str | None = None

    def __init__(self, *, poison_dead: bool = False) -> None:
        self.arena = Arena()
        self._poison_dead = poison_dead
        self._open: _OpenTape | None = None

    def warm_up(self, work: Callable[[], None]) -> None:
        """Runs `work` eagerly."""
        work()

    def record(self, work: Callable[[], None]) -> TapeRecording:
        """Runs `work` once while recording it.

        Memory that existed before is read and written in place at each replay. What `work` makes
        and drops is rebound to the shared arena.

        Raises:
            RecordingError: An operation needs the host, or another recording is on.
        """
        if self._open is not None:
            raise RecordingError("another recording is on; one at a time")
        tape = self._open = _OpenTape()
        try:
            with torch.inference_mode(), _TapeMode(tape):
                work()
        finally:
            self._open = None
        if tape.refused is not None:
            raise RecordingError(tape.refused)
        return TapeRecording(tape, self.arena, poison_dead=self._poison_dead)

    @contextmanager
    def enter(self, index: int) -> Iterator[None]:
        """Joins a microbatch thread to the recording that is on, if one is."""
        tape = self._open
        with torch.inference_mode(), nullcontext() if tape is None else _TapeMode(tape):
            yield


def _copy_into(targets: list[torch.Tensor | None], result: object) -> None:
    for target, leaf in zip(targets, leaves(result), strict=True):
        if target is not None:
            assert isinstance(leaf, torch.Tensor)
            target.copy_(leaf)


def _poison(block: torch.Tensor) -> Callable[[], object]:
    # All bits set is NaN in every float format and -1 in signed integers.
    return lambda: block.fill_(0xFF)
