"""Pinned host memory that a device copy reads: a few slots, each reused when its copy is done."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


class StagingPool:
    """`depth` host slots of `num_bytes`; a step fills one and uploads a prefix of it.

    Uploads run on the stream that is current when the pool is made, which must be current then.

    A slot is handed out again only after the device has read it. That wait is for one copy,
    never for the queue behind it.
    """

    def __init__(self, num_bytes: int, device: torch.device, depth: int = 4) -> None:
        pin = device.type == "cuda"
        self._slots = [
            torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pin) for _ in range(depth)
        ]
        self.arrays: list[NDArray[np.uint8]] = [slot.numpy() for slot in self._slots]
        self._read = [torch.cuda.Event() for _ in range(depth)] if pin else None
        # An event that has to look the current stream up takes about twice as long to record.
        self._stream = torch.cuda.current_stream() if pin else None
        self._used = [False] * depth
        self._next = 0
        self._prefixes: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}

    def acquire(self) -> tuple[int, NDArray[np.uint8]]:
        """Returns a slot's index and its bytes; the bytes hold what an earlier step left."""
        index = self._next
        self._next = (index + 1) % len(self._slots)
        if self._read is not None and self._used[index]:
            self._read[index].synchronize()
        return index, self.arrays[index]

    def upload(self, index: int, num_bytes: int, target: torch.Tensor) -> None:
        """Enqueues one copy of the slot's first `num_bytes` into `target`."""
        prefix = self._prefixes.get((index, num_bytes))
        if prefix is None or prefix[0] is not target:
            prefix = (target, target[:num_bytes], self._slots[index][:num_bytes])
            self._prefixes[index, num_bytes] = prefix
        prefix[1].copy_(prefix[2], non_blocking=True)
        if self._read is not None:
            self._read[index].record(self._stream)
            self._used[index] = True
