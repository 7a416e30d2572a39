"""The step as a reference: fresh buffers and cache, unpadded, unsplit, from the token lists.

Shares the model's weights with the engine and nothing else: no buffer, no table, no prepare code.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from cgprof.attention.backend import AttentionBackend
from cgprof.batch.context import AttentionMetadata, ForwardContext, InputBatch, PlainHandoff
from cgprof.batch.request import RequestTable
from cgprof.engine.types import Step
from cgprof.graphs.dispatch import eager_key
from cgprof.models.decoder import Decoder
from cgprof.shapes import BatchShape


class Reference:
    """Computes the context of every live request into a cache of its own, once; then runs steps."""

    def __init__(
        self,
        *,
        model: Decoder,
        backend: AttentionBackend,
        kv_cache: torch.Tensor,
        table: RequestTable,
        chunk: int,
    ) -> None:
        """Prefills in batches of at most `chunk` tokens; `kv_cache` is the engine's."""
        self._model = model
        self._backend = backend
        self._engine_cache = kv_cache
        self._block_size = kv_cache.shape[3]
        self._device = kv_cache.device
        self._tokens = {
            row: table.token_ids[row, : table.num_tokens[row]] for row in table.requests
        }
        self._computed = {row: int(table.num_computed[row]) for row in table.requests}
        self._blocks = self._own_blocks()
        count = 1 + sum(len(blocks) for blocks in self._blocks.values())
        self._cache = kv_cache.new_zeros((kv_cache.shape[0], count, *kv_cache.shape[2:]))
        self._prefill(chunk)

    def hidden(self, step: Step, *, padded_tokens: int | None = None) -> torch.Tensor:
        """Returns the hidden states of the step's tokens [t, D] in the step's order.

        `padded_tokens` adds rows of padding: the same numbers by kernels of another size, which
        is how the noise floor is measured.
        """
        parts = [
            (int(row), self._computed[int(row)], int(length))
            for row, length in zip(step.rows, step.query_lens, strict=True)
        ]
        return self._run(parts, padded_tokens or step.shape.num_tokens)[: step.shape.num_tokens]

    def _own_blocks(self) -> dict[int, list[int]]:
        needed = {row: -(-len(ids) // self._block_size) for row, ids in self._tokens.items()}
        order = np.random.default_rng(1).permutation(sum(needed.values())) + 1
        blocks, start = {}, 0
        for row, count in needed.items():
            blocks[row] = order[start : start + count].tolist()
            start += count
        return blocks

    def _prefill(self, chunk: int) -> None:
        parts: list[tuple[int, int, int]] = []
        room = chunk
        for row, context in self._computed.items():
            start = 0
            while start < context:
                length = min(room, context - start)
                parts.append((row, start, length))
                start, room = start + length, room - length
                if not room:
                    self._run(parts, chunk)
                    parts, room = [], chunk
        if parts:
            self._run(parts, chunk - room)

    def _run(self, parts: Sequence[tuple[int, int, int]], num_tokens: int) -> torch.Tensor:
        """Runs (row, start, length) parts as one eager pass."""
        ids, positions, slots, starts, lengths = [], [], [], [0], []
        for row, start, length in parts:
            for position in range(start, start + length):
                ids.append(int(self._tokens[row][position]))
                positions.append(position)
                block = self._blocks[row][position // self._block_size]
                slots.append(block * self._block_size + position % self._block_size)
            starts.append(len(ids))
            lengths.append(start + length)
        real = len(ids)
        padding = num_tokens - real
        width = max(len(self._blocks[row]) for row, _, _ in parts)
        tables = [self._blocks[row] + [0] * (width - len(self._blocks[row])) for row, _, _ in parts]
        longest = max(length for _, _, length in parts)
        shape = BatchShape(num_reqs=len(parts), num_tokens=real, max_query_len=longest)
        context = ForwardContext(
            batch=InputBatch(
                shape=shape,
                padded=eager_key(num_tokens),
                input_ids=self._tensor(ids + [0] * padding, torch.int32),
                positions=self._tensor(positions + [0] * padding, torch.int64),
                is_padding=self._tensor([False] * real + [True] * padding, torch.bool),
            ),
            attention=AttentionMetadata(
                query_start_loc=self._tensor(starts, torch.int32),
                seq_lens=self._tensor(lengths, torch.int32),
                block_table=self._tensor(tables, torch.int32),
                slot_mapping=self._tensor(slots + [-1] * padding, torch.int64),
                max_query_len=longest,
                max_seq_len=max(lengths),
            ),
            tokens_per_rank=(num_tokens,),
            handoff=PlainHandoff(),
        )
        out = torch.empty(
            (num_tokens, self._model.config.hidden_size),
            dtype=self._engine_cache.dtype,
            device=self._device,
        )
        self._model.bind_cache(self._cache, self._backend)
        try:
            self._model.forward(context, out)
        finally:
            self._model.bind_cache(self._engine_cache, self._backend)
        return out

    def _tensor(self, values: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)
