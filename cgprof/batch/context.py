"""What a forward pass is told besides its weights: inputs, attention metadata, and the handoff."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from cgprof.shapes import BatchShape, GraphKey


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBatch:
    """One step's views of the buffers, padded to a key; valid until the next prepare.

    Padding rows are written every step: id 0, position 0, slot -1, length 0.
    """

    shape: BatchShape
    padded: GraphKey
    input_ids: torch.Tensor  # [T] i32
    positions: torch.Tensor  # [T] i64
    is_padding: torch.Tensor  # [T] bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """Where each token's keys are. In a graph the key fixes both maxima, never the batch."""

    query_start_loc: torch.Tensor  # [R+1] i32, flat over padding rows
    seq_lens: torch.Tensor  # [R] i32, 0 in padding rows
    block_table: torch.Tensor  # [R, N] i32
    slot_mapping: torch.Tensor  # [T] i64, -1 writes nothing
    max_query_len: int
    max_seq_len: int


class Handoff(Protocol):
    """Runs a transfer so that the peer microbatch can compute meanwhile."""

    @property
    def index(self) -> int:
        """Which microbatch's it is; 0 for a step that is not split. Buffers are chosen by it."""

    def communicate(
        self, op: Callable[[], None] | None, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Issues `op`, runs `meanwhile`, lets the peer compute, and waits for `op` to be done.

        `op` writes into buffers that exist already. On return its result may be read on the
        stream that was current at the call. None transfers nothing: the streams do not meet.
        """


class PlainHandoff:
    """The handoff of a step that is not split: `op`, then `meanwhile`."""

    index: Final = 0

    def communicate(
        self, op: Callable[[], None] | None, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Calls both in turn."""
        if op is not None:
            op()
        if meanwhile is not None:
            meanwhile()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """Passed down to every layer; one per microbatch."""

    batch: InputBatch
    attention: AttentionMetadata
    tokens_per_rank: tuple[int, ...]
    handoff: Handoff
