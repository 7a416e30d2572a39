"""Writes a step's inputs on the host, padded to a key, and uploads them. No loop over requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cgprof.batch.buffers import HostFields, InputBuffers
from cgprof.batch.request import RequestTable
from cgprof.engine.sampler import uniform_draws
from cgprof.engine.types import Step
from cgprof.errors import ReplayError
from cgprof.kvcache.block_table import BlockTable
from cgprof.kvcache.slots import compute_slots, token_positions
from cgprof.microbatch.split import Microbatch, cut, fill
from cgprof.microbatch.spread import Region
from cgprof.shapes import BatchShape, GraphKey


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingFill:
    """What padding rows hold besides slot -1 and length 0; zeros in every real step.

    Checks put another request's values there: nothing of them may reach a real row.
    """

    input_id: int = 0
    position: int = 0
    block: int = 0


CLEAN = PaddingFill()


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenInputs:
    """What was written for a step."""

    host: HostFields  # its views hold until the slot comes round again
    num_reqs: int  # padding rows included
    microbatches: tuple[Microbatch, ...]  # none for a plain key
    any_random: bool  # whether a request samples, and not all are greedy


def padded_requests(key: GraphKey, shape: BatchShape) -> int:
    """Returns the rows of the block table that a step uses; an idle rank's has one of padding."""
    return max(shape.num_reqs, 1) if key.num_reqs is None else key.num_reqs


@dataclass(frozen=True, slots=True)
class _Layout:
    """All that some fields depend on in a step of one token each, greedy, in order of requests.

    They are query_start_loc, sample_rows, temperature, draws and is_padding, padding included.
    """

    real: int  # requests, and tokens
    num_reqs: int
    num_tokens: int


class InputWriter:
    """Fills the buffers from the requests' state.

    A host slot whose last step had the same layout keeps the fields that depend on nothing else.
    """

    def __init__(self, table: RequestTable, block_table: BlockTable, buffers: InputBuffers) -> None:
        self._table = table
        self._block_table = block_table
        self._buffers = buffers
        self._ramp = np.arange(buffers.max_num_reqs + 1)

    def write(
        self, step: Step, key: GraphKey, padding: PaddingFill, spread: Sequence[Region] = ()
    ) -> WrittenInputs:
        """Writes every field, padded to the key, and uploads them in one copy.

        With `spread`, rows lie in these regions instead of one after another. What sampling reads
        stays in the order of requests, so that tokens come home in it.

        Raises:
            ReplayError: The step does not fit the key, or the key does not fit the buffers.
        """
        num_reqs = self._check_fit(key, step.shape)
        host, before = self._buffers.begin(), self._buffers.kept
        computed = self._table.num_computed.take(step.rows)
        temperature = self._table.temperature.take(step.rows)
        any_random = bool(temperature.any())
        layout = None
        if step.one_each and not any_random and not spread:
            layout = _Layout(step.rows.size, num_reqs, key.num_tokens)
        self._write_requests(host, step, computed, num_reqs, padding)
        self._write_tokens(host, step, computed, key.num_tokens, padding)
        if layout is None or layout != before:
            self._write_layout(host, step, num_reqs, key.num_tokens)
            self._write_sampling(host, step, temperature if any_random else None, num_reqs)
        if spread:
            self._move_apart(host, spread, padding)
        microbatches = self._split(host, key, num_reqs, step.query_lens, spread)
        self._buffers.commit(num_reqs, keep=layout)
        return WrittenInputs(
            host=host, num_reqs=num_reqs, microbatches=microbatches, any_random=any_random
        )

    def _check_fit(self, key: GraphKey, shape: BatchShape) -> int:
        """Returns the padded number of requests; these bounds guard the writes that follow."""
        num_reqs = padded_requests(key, shape)
        tokens, reqs = self._buffers.max_num_tokens, self._buffers.max_num_reqs
        if key.num_tokens > tokens or num_reqs > reqs:
            raise ReplayError(str(key), f"the buffers hold {tokens} tokens and {reqs} requests")
        if shape.num_tokens > key.num_tokens or shape.num_reqs > num_reqs:
            raise ReplayError(
                str(key), f"{shape.num_tokens} tokens of {shape.num_reqs} requests do not fit"
            )
        return num_reqs

    def _write_requests(
        self,
        host: HostFields,
        step: Step,
        computed: NDArray[np.int32],
        num_reqs: int,
        padding: PaddingFill,
    ) -> None:
        rows, real = step.rows, step.rows.size
        np.add(computed, step.query_lens, out=host.seq_lens[:real])
        self._block_table.array.take(rows, axis=0, out=host.block_table[:real], mode="clip")
        if real < num_reqs:
            pad = slice(real, num_reqs)
            host.seq_lens[pad] = 0
            host.block_table[pad] = padding.block

    def _write_layout(self, host: HostFields, step: Step, num_reqs: int, num_tokens: int) -> None:
        """Which tokens are whose; needs nothing of the requests' state."""
        real, tokens = step.rows.size, step.shape.num_tokens
        starts = host.query_start_loc[: real + 1]
        if step.one_each:
            starts[:] = self._ramp[: real + 1]
            host.sample_rows[:real] = self._ramp[:real]
        else:
            starts[0] = 0
            step.query_lens.cumsum(out=starts[1:])
            np.subtract(starts[1:], 1, out=host.sample_rows[:real])
        host.query_start_loc[real + 1 : num_reqs + 1] = tokens
        host.sample_rows[real:num_reqs] = 0
        host.is_padding[:tokens] = False
        host.is_padding[tokens:num_tokens] = True

    def _write_sampling(
        self,
        host: HostFields,
        step: Step,
        temperature: NDArray[np.float32] | None,
        num_reqs: int,
    ) -> None:
        """Temperatures, None if all are greedy, and draws, which a greedy token does not need."""
        if temperature is None:
            host.temperature[:num_reqs] = 0
            host.draws[:num_reqs] = 0
            return
        real = step.rows.size
        host.temperature[:real] = temperature
        host.draws[:real] = uniform_draws(self._table.seed[step.rows], host.seq_lens[:real])
        host.temperature[real:num_reqs] = 0
        host.draws[real:num_reqs] = 0

    def _write_tokens(
        self,
        host: HostFields,
        step: Step,
        computed: NDArray[np.int32],
        num_tokens: int,
        padding: PaddingFill,
    ) -> None:
        rows, lens, real = step.rows, step.query_lens, step.shape.num_tokens
        positions = host.positions[:real]
        if step.one_each:
            positions[:], token_rows = computed, rows
        else:
            token_positions(computed, lens, positions)
            token_rows = np.repeat(rows, lens)
        host.input_ids[:real] = self._table.token_ids[token_rows, positions]
        compute_slots(
            self._block_table.array,
            token_rows,
            positions,
            self._block_table.block_size,
            host.slot_mapping[:real],
        )
        if real < num_tokens:
            pad = slice(real, num_tokens)
            host.positions[pad] = padding.position
            host.input_ids[pad] = padding.input_id
            host.slot_mapping[pad] = -1

    def _move_apart(self, host: HostFields, spread: Sequence[Region], padding: PaddingFill) -> None:
        """Moves the rows just written, of one token each, to their regions."""
        ramp = self._ramp
        filled = (
            (host.seq_lens, 0),
            (host.block_table, padding.block),
            (host.input_ids, padding.input_id),
            (host.positions, padding.position),
            (host.slot_mapping, -1),
            (host.is_padding, True),
        )
        # Rows move up only: the last region first, before another's rows overwrite its own.
        for region in reversed(spread):
            first, stop = region.first_token, region.first_token + region.num_tokens
            start, gap = region.start, region.start + region.num_tokens
            for field, pad in filled:
                if start > first:
                    field[start:gap] = field[first:stop]
                field[gap : region.stop] = pad
            host.query_start_loc[start : gap + 1] = ramp[first : stop + 1]
            host.query_start_loc[gap + 1 : region.stop + 1] = stop
            host.sample_rows[first:stop] = ramp[start:gap]

    def _split(
        self,
        host: HostFields,
        key: GraphKey,
        num_reqs: int,
        query_lens: NDArray[np.int32],
        spread: Sequence[Region],
    ) -> tuple[Microbatch, ...]:
        if key.num_microbatches == 1:
            return ()
        microbatches = cut(query_lens, key, num_reqs, spread)
        fill(
            microbatches,
            host.query_start_loc[: num_reqs + 1],
            host.seq_lens[:num_reqs],
            host.split_query_start_loc,
            host.split_seq_lens,
        )
        return microbatches
