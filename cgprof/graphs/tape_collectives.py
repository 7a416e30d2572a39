"""Collectives on a tape: waited for where they are issued, in the recording and in every replay.

A Work may compute when it is waited for, each time anew: gloo's reduce-scatter copies its rows out
of a buffer of its own. Such copies are part of the collective. By themselves on a tape, they would
bring the rows of the recording back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from cgprof.graphs.tape_values import leaves


def wait_for(result: object) -> None:
    """Waits for every Work that a collective returned."""
    for leaf in leaves(result):
        if hasattr(leaf, "wait"):
            leaf.wait()


class WorkBuffers:
    """The memory that the Works of one recording keep for themselves."""

    def __init__(self) -> None:
        self._buffers: set[StorageWeakRef] = set()
        self._lock = threading.Lock()

    def finish(self, result: object, given: Iterable[object]) -> None:
        """Waits for a collective; what that touches besides the tensors `given` is the Work's."""
        touched = _Touched()
        with touched:
            wait_for(result)
        with self._lock:
            self._buffers |= touched.storages - _storages(given)

    def hold(self, values: Iterable[object]) -> bool:
        """Returns whether a tensor among these lies in such memory."""
        return bool(self._buffers) and not self._buffers.isdisjoint(_storages(values))


class _Touched(TorchDispatchMode):
    """Notes the storages of all operations."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.storages: set[StorageWeakRef] = set()

    def __torch_dispatch__(
        self,
        func: object,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        assert callable(func)
        given = kwargs or {}
        self.storages |= _storages([*args, *given.values()])
        return func(*args, **given)


def _storages(values: Iterable[object]) -> set[StorageWeakRef]:
    return {
        StorageWeakRef(leaf.untyped_storage())
        for value in values
        for leaf in leaves(value)
        if isinstance(leaf, torch.Tensor)
    }
