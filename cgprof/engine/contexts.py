"""The contexts that a pass runs with: the whole batch's, or one a microbatch."""

from __future__ import annotations

from collections.abc import Sequence

from cgprof.batch.buffers import InputBuffers
from cgprof.batch.context import AttentionMetadata, ForwardContext, Handoff, InputBatch
from cgprof.config.schema import Limits
from cgprof.engine.inputs import padded_requests
from cgprof.microbatch.runner import MicrobatchRunner
from cgprof.microbatch.split import Microbatch, slice_context
from cgprof.shapes import BatchShape, GraphKey


class Contexts:
    """Makes contexts over one set of buffers; `handoff` is that of whole steps."""

    def __init__(
        self,
        buffers: InputBuffers,
        limits: Limits,
        *,
        handoff: Handoff,
        microbatches: MicrobatchRunner | None,
        num_ranks: int,
    ) -> None:
        self._buffers = buffers
        self._limits = limits
        self._handoff = handoff
        self._microbatches = microbatches
        self._num_ranks = num_ranks

    def make(
        self,
        key: GraphKey,
        shape: BatchShape,
        microbatches: Sequence[Microbatch],
        longest: int | None,
    ) -> tuple[ForwardContext, ...]:
        """Returns the contexts of a batch that lies in the buffers.

        `longest` is its longest context; None takes the key's bounds, as a graph must.
        """
        fields = self._buffers.device_fields
        num_reqs = padded_requests(key, shape)
        exact = longest is not None
        whole = ForwardContext(
            batch=InputBatch(
                shape=shape,
                padded=key,
                input_ids=fields.input_ids[: key.num_tokens],
                positions=fields.positions[: key.num_tokens],
                is_padding=fields.is_padding[: key.num_tokens],
            ),
            attention=AttentionMetadata(
                query_start_loc=fields.query_start_loc[: num_reqs + 1],
                seq_lens=fields.seq_lens[:num_reqs],
                block_table=fields.block_table[:num_reqs],
                slot_mapping=fields.slot_mapping[: key.num_tokens],
                max_query_len=(
                    shape.max_query_len if exact else key.uniform_query_len or key.num_tokens
                ),
                max_seq_len=longest if longest is not None else self._limits.max_model_len,
            ),
            tokens_per_rank=(key.num_tokens,) * self._num_ranks,
            handoff=self._handoff,
        )
        if not microbatches or self._microbatches is None:
            return (whole,)
        return tuple(
            slice_context(
                whole,
                microbatch,
                fields.split_query_start_loc,
                fields.split_seq_lens,
                self._microbatches.handoff(microbatch.index),
            )
            for microbatch in microbatches
        )
