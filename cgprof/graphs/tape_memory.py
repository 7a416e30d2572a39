"""Where the tensors of a tape live: described while recording, bound to a shared arena afterwards.

A recording holds no tensor that was made inside it, so recording needs no more memory than an
eager step. Afterwards what was made inside gets arena memory by last use, and what outlived the
recording keeps its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cgprof.errors import RecordingError

_ALIGNMENT_BYTES = 64  # of torch's CPU allocator: kernels choose the same paths as in eager


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """What a tensor looked like in one operation: a storage, by number, and a view of it."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements


@dataclass(frozen=True, slots=True)
class Lifetime:
    """The first and the last executing operation that touch a storage."""

    first: int
    last: int
    num_bytes: int


class Arena:
    """One block of memory that all tapes of a recorder use in turn.

    It grows in place: tensors bound to it earlier follow, because they share its storage.
    """

    def __init__(self) -> None:
        self.storage = torch.UntypedStorage(0)

    @property
    def num_bytes(self) -> int:
        """The size that the most demanding recording so far has asked for."""
        return self.storage.nbytes()

    def reserve(self, num_bytes: int) -> int:
        """Makes room for `num_bytes` and returns by how much the arena grew."""
        growth = max(0, num_bytes - self.num_bytes)
        if growth:
            self.storage.resize_(num_bytes)
        return growth


class TapeMemory:
    """The storages of one recording. `describe` while recording, then `settle`, then `tensor`."""

    def __init__(self) -> None:
        self._numbers: dict[StorageWeakRef, int] = {}
        self._held: dict[int, torch.UntypedStorage] = {}
        self._num_bytes: list[int] = []
        self._arena: Arena | None = None
        self._offsets: dict[int, int] = {}
        self._bound: dict[TensorPlace, torch.Tensor] = {}

    def describe(self, tensor: torch.Tensor, *, is_output: bool) -> TensorPlace:
        """Returns where `tensor` is; a storage first seen as an output was made inside.

        Raises:
            RecordingError: Not a plain strided tensor on the CPU.
        """
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise RecordingError(
                f"a {tensor.layout} tensor on {tensor.device} cannot be recorded on a tape; "
                "only strided CPU tensors can"
            )
        if tensor.is_conj() or tensor.is_neg():
            raise RecordingError(
                "a lazily conjugated or negated tensor cannot be recorded on a tape; "
                "call resolve_conj() or resolve_neg() first"
            )
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        number = self._numbers.setdefault(reference, len(self._num_bytes))
        if number == len(self._num_bytes):
            self._num_bytes.append(0)
            if not is_output:
                self._held[number] = storage
        self._num_bytes[number] = max(self._num_bytes[number], storage.nbytes())
        return TensorPlace(
            number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        )

    def settle(self, touched: Sequence[Iterable[int]], arena: Arena) -> int:
        """Gives arena memory to what was made inside; `touched` are storages by operation.

        Returns the bytes that this recording adds: growth of the arena, and what outlived it.
        """
        outlived = 0
        for reference, number in self._numbers.items():
            if number not in self._held and not reference.expired():
                self._held[number] = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
                outlived += self._num_bytes[number]
        self._numbers.clear()
        lifetimes = self._lifetimes(touched)
        self._offsets, needed = place(lifetimes)
        self._arena = arena
        return outlived + arena.reserve(needed)

    def tensor(self, where: TensorPlace) -> torch.Tensor:
        """Returns the tensor of a place, on arena memory or on the storage that it always had."""
        found = self._bound.get(where)
        if found is None:
            storage, base = self._storage_of(where)
            offset = base // where.dtype.itemsize + where.offset
            found = torch.empty(0, dtype=where.dtype).set_(
                storage, offset, where.size, where.stride
            )
            self._bound[where] = found
        return found

    def arena_bytes_of(self, number: int) -> torch.Tensor | None:
        """Returns the arena memory [bytes] of a storage, or None where it has its own."""
        if number not in self._offsets or not self._num_bytes[number]:
            return None
        size = (self._num_bytes[number],)
        return self.tensor(TensorPlace(number, torch.uint8, size, (1,), 0))

    def _storage_of(self, where: TensorPlace) -> tuple[torch.UntypedStorage, int]:
        if where.storage in self._held:
            return self._held[where.storage], 0
        assert self._arena is not None
        return self._arena.storage, self._offsets[where.storage]

    def _lifetimes(self, touched: Sequence[Iterable[int]]) -> dict[int, Lifetime]:
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for step, numbers in enumerate(touched):
            for number in numbers:
                if number not in self._held:
                    first.setdefault(number, step)
                    last[number] = step
        return {n: Lifetime(first[n], last[n], self._num_bytes[n]) for n in first}


def place(lifetimes: Mapping[int, Lifetime]) -> tuple[dict[int, int], int]:
    """Returns each storage's offset, first fit in order of first use, and the bytes needed in all.

    Storages that one operation touches never overlap, also when one ends where another begins.
    """
    live: list[tuple[int, int, int]] = []  # offset, end, last use; by offset
    offsets: dict[int, int] = {}
    needed = 0
    for number, life in sorted(lifetimes.items(), key=lambda item: item[1].first):
        live = [entry for entry in live if entry[2] >= life.first]
        size = -(-life.num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        start = 0
        for offset, end, _ in live:
            if start + size <= offset:
                break
            start = max(start, end)
        offsets[number] = start
        needed = max(needed, start + size)
        if size:
            live.append((start, start + size, life.last))
            live.sort()
    return offsets, needed
