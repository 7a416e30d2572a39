"""A step's inputs on the device, at addresses that never change, and their host mirror.

All fields lie in one block of bytes, so that a step costs one host-to-device copy.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cgprof.staging.pinned import StagingPool

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFields:
    """Views of one staging slot, written by the host. Letters as in `cgprof.shapes`."""

    query_start_loc: NDArray[np.int32]  # [R+1]
    seq_lens: NDArray[np.int32]  # [R] tokens in KV after this step; 0 in padding rows
    split_query_start_loc: NDArray[np.int32]  # [M, R+1] each microbatch's own
    split_seq_lens: NDArray[np.int32]  # [M, R]
    sample_rows: NDArray[np.int64]  # [R] token row whose logits a request needs
    temperature: NDArray[np.float32]  # [R]
    draws: NDArray[np.float32]  # [R] uniform number in [0, 1) for seeded sampling
    input_ids: NDArray[np.int32]  # [T]
    positions: NDArray[np.int64]  # [T]
    slot_mapping: NDArray[np.int64]  # [T] -1 writes nothing
    is_padding: NDArray[np.bool_]  # [T]
    block_table: NDArray[np.int32]  # [R, N]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFields:
    """The same fields on the device; addresses hold for the life of the engine."""

    query_start_loc: torch.Tensor  # [R+1] i32
    seq_lens: torch.Tensor  # [R] i32
    split_query_start_loc: torch.Tensor  # [M, R+1] i32
    split_seq_lens: torch.Tensor  # [M, R] i32
    sample_rows: torch.Tensor  # [R] i64
    temperature: torch.Tensor  # [R] f32
    draws: torch.Tensor  # [R] f32
    input_ids: torch.Tensor  # [T] i32
    positions: torch.Tensor  # [T] i64
    slot_mapping: torch.Tensor  # [T] i64
    is_padding: torch.Tensor  # [T] bool
    block_table: torch.Tensor  # [R, N] i32


class InputBuffers:
    """Allocated once at the limits. `begin` opens a host slot, `commit` uploads it.

    Uploads run on the stream that is current now, which must be current then.
    """

    def __init__(
        self,
        *,
        max_num_tokens: int,
        max_num_reqs: int,
        blocks_per_request: int,
        num_microbatches: int,
        device: torch.device,
    ) -> None:
        t, r, n, m = max_num_tokens, max_num_reqs, blocks_per_request, num_microbatches
        self.max_num_tokens = t
        self.max_num_reqs = r
        # The block table comes last: a step copies only the rows that it uses.
        self._layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "query_start_loc": ((r + 1,), torch.int32),
            "seq_lens": ((r,), torch.int32),
            "split_query_start_loc": ((m, r + 1), torch.int32),
            "split_seq_lens": ((m, r), torch.int32),
            "sample_rows": ((r,), torch.int64),
            "temperature": ((r,), torch.float32),
            "draws": ((r,), torch.float32),
            "input_ids": ((t,), torch.int32),
            "positions": ((t,), torch.int64),
            "slot_mapping": ((t,), torch.int64),
            "is_padding": ((t,), torch.bool),
            "block_table": ((r, n), torch.int32),
        }
        self._offsets: dict[str, int] = {}
        offset = 0
        for name, (shape, dtype) in self._layout.items():
            self._offsets[name] = offset
            size = int(np.prod(shape)) * dtype.itemsize
            offset += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._block = torch.zeros(offset, dtype=torch.uint8, device=device)
        self._staging = StagingPool(offset, device)
        self._host_fields = [self._host_views(array) for array in self._staging.arrays]
        self._row_bytes = n * torch.int32.itemsize
        self.device_fields = DeviceFields(
            **{name: self._device_view(name) for name in self._layout}
        )
        # Read before every replay, hence kept at hand.
        self._addressed = self.device_fields
        self._tensors: tuple[torch.Tensor, ...] = _ALL_FIELDS(self._addressed)
        self._slot = -1
        self.kept: object = None
        self._kept: dict[int, object] = {}  # by slot

    def begin(self) -> HostFields:
        """Opens the next host slot; every padded element of every field must be written.

        `kept` is then what the slot's last `commit` was given, whoever wrote it.
        """
        self._slot, _ = self._staging.acquire()
        self.kept = self._kept.pop(self._slot, None)
        return self._host_fields[self._slot]

    def commit(self, num_rows: int, keep: object = None) -> None:
        """Uploads the open slot with the first `num_rows` rows of the block table; one enqueue.

        `keep` says what was written, for whoever opens the slot next.
        """
        num_bytes = self._offsets["block_table"] + num_rows * self._row_bytes
        self._staging.upload(self._slot, num_bytes, self._block)
        self._kept[self._slot] = keep

    def addresses(self) -> tuple[int, ...]:
        """The device address of each field, in field order."""
        if self.device_fields is not self._addressed:
            self._addressed = self.device_fields
            self._tensors = _ALL_FIELDS(self._addressed)
        return tuple(map(torch.Tensor.data_ptr, self._tensors))

    def _host_views(self, raw: NDArray[np.uint8]) -> HostFields:
        views: dict[str, Any] = {}
        for name, (shape, dtype) in self._layout.items():
            offset = self._offsets[name]
            size = int(np.prod(shape)) * dtype.itemsize
            views[name] = raw[offset : offset + size].view(_NUMPY[dtype]).reshape(shape)
        return HostFields(**views)

    def _device_view(self, name: str) -> torch.Tensor:
        shape, dtype = self._layout[name]
        size = int(np.prod(shape)) * dtype.itemsize
        start = self._offsets[name]
        return self._block[start : start + size].view(dtype).view(shape)


_ALL_FIELDS = attrgetter(*(field.name for field in fields(DeviceFields)))
_NUMPY = {
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float32: np.float32,
    torch.bool: np.bool_,
}
