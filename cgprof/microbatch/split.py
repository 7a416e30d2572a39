"""Where to cut a step, and each microbatch's view of it.

Tokens are cut at fixed places of the padded size, so a request may straddle a cut. Everything a
microbatch sees is a view, save query starts and lengths, which it keeps in buffers of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from cgprof.batch.context import AttentionMetadata, ForwardContext, Handoff, InputBatch
from cgprof.batch.request import IntArray
from cgprof.errors import MicrobatchError
from cgprof.microbatch.spread import Region
from cgprof.shapes import BatchShape, GraphKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """One part of a step: which tokens, and which requests have a token among them."""

    index: int
    req_slice: slice
    token_slice: slice
    num_real_tokens: int
    tokens_before: int  # of the step's query starts, in earlier microbatches

    @property
    def num_reqs(self) -> int:
        """Rows of this microbatch, padding rows included."""
        return int(self.req_slice.stop - self.req_slice.start)

    @property
    def num_tokens(self) -> int:
        """Tokens of this microbatch, padding included."""
        return int(self.token_slice.stop - self.token_slice.start)


def cut(
    query_lens: IntArray, key: GraphKey, num_reqs: int, spread: Sequence[Region] = ()
) -> tuple[Microbatch, ...]:
    """Returns the parts of a step whose real requests have `query_lens` [r].

    Cuts lie at multiples of `key.num_tokens // key.num_microbatches`; the last part takes the rest
    and all padding rows. A part wholly in padding holds the last request with no token.
    Under a uniform key padding rows are laid out like real ones: the request split, which a graph
    freezes, depends on the key alone.

    Args:
        query_lens: [r].
        key: The padded size and how many parts.
        num_reqs: Requests padded, R; the key's own when it has them.
        spread: Where one-token requests lie, a region a part; empty: one after another.

    Raises:
        MicrobatchError: The batch lies outside the key, or there are fewer tokens than parts.
    """
    num_tokens, count = key.num_tokens, key.num_microbatches
    num_real = int(query_lens.sum())
    if len(query_lens) > num_reqs or num_real > num_tokens:
        raise MicrobatchError(
            count - 1,
            f"{len(query_lens)} requests of {num_real} tokens do not fit the padded "
            f"{num_reqs} requests of {num_tokens} tokens",
        )
    if num_tokens < count:
        raise MicrobatchError(count - 1, f"{num_tokens} tokens cannot be cut into {count} parts")
    if key.uniform_query_len is None:
        starts = np.cumsum(query_lens, dtype=np.int32) - query_lens
        slices = _slices(starts, num_tokens, count, num_reqs)
    else:
        slices = _uniform_slices(key.uniform_query_len, num_tokens, count, num_reqs)
        if (query_lens != key.uniform_query_len).any():
            raise MicrobatchError(
                0, f"query lengths {sorted(set(query_lens.tolist()))} do not all fit key {key}"
            )
    if spread:
        return _spread_parts(slices, spread)
    return tuple(
        Microbatch(
            index=index,
            req_slice=reqs,
            token_slice=tokens,
            num_real_tokens=_clamp(num_real - tokens.start, tokens.stop - tokens.start),
            tokens_before=tokens.start,
        )
        for index, (reqs, tokens) in enumerate(slices)
    )


def fill(
    microbatches: Sequence[Microbatch],
    query_start_loc: IntArray,
    seq_lens: IntArray,
    split_query_start_loc: IntArray,
    split_seq_lens: IntArray,
) -> None:
    """Writes each microbatch's query starts and lengths, whole rows, from those of the step.

    A request that goes on in a later microbatch is as long as its tokens so far; tokens of an
    earlier microbatch are in the KV cache by then and count.

    Args:
        microbatches: From `cut`.
        query_start_loc: [R+1], flat over padding rows, also those between real ones.
        seq_lens: [R], 0 in padding rows.
        split_query_start_loc: [M, R+1], written.
        split_seq_lens: [M, R], written.

    Raises:
        MicrobatchError: A microbatch does not fit its buffers.
    """
    for part in microbatches:
        _check_fits(part, split_query_start_loc.shape, split_seq_lens.shape)
        first, stop = part.req_slice.start, part.req_slice.stop
        rows = stop - first
        starts, lens = split_query_start_loc[part.index], split_seq_lens[part.index]
        own, before, width = starts[: rows + 1], part.tokens_before, part.num_tokens
        np.subtract(query_start_loc[first : stop + 1], before, out=own)
        np.maximum(own, 0, out=own)
        np.minimum(own, width, out=own)
        starts[rows + 1 :] = starts[rows]
        lens[:rows] = seq_lens[first:stop]
        lens[rows:] = 0
        if rows:
            lens[rows - 1] -= max(0, int(query_start_loc[stop]) - before - width)


def slice_context(
    context: ForwardContext,
    microbatch: Microbatch,
    split_query_start_loc: torch.Tensor,
    split_seq_lens: torch.Tensor,
    handoff: Handoff,
) -> ForwardContext:
    """Returns a microbatch's context: views of the step's tensors and of its own buffers.

    Args:
        context: The whole step's.
        microbatch: From `cut`.
        split_query_start_loc: [M, R+1] on the device.
        split_seq_lens: [M, R] on the device.
        handoff: The microbatch's own.

    Raises:
        MicrobatchError: The microbatch reaches beyond the step's tensors or its own buffers.
    """
    batch, attention = context.batch, context.attention
    tokens, reqs, rows = microbatch.token_slice, microbatch.req_slice, microbatch.num_reqs
    _check_fits(microbatch, split_query_start_loc.shape, split_seq_lens.shape)
    held_tokens = min(batch.input_ids.shape[0], attention.slot_mapping.shape[0])
    held_reqs = attention.block_table.shape[0]
    if tokens.stop > held_tokens or reqs.stop > held_reqs:
        raise MicrobatchError(
            microbatch.index,
            f"needs tokens to {tokens.stop} and requests to {reqs.stop}, the step has "
            f"{held_tokens} and {held_reqs}",
        )
    uniform = batch.padded.uniform_query_len
    return ForwardContext(
        batch=InputBatch(
            shape=_slice_shape(batch.shape, microbatch),
            padded=_slice_key(batch.padded, microbatch),
            input_ids=batch.input_ids[tokens],
            positions=batch.positions[tokens],
            is_padding=batch.is_padding[tokens],
        ),
        attention=AttentionMetadata(
            query_start_loc=split_query_start_loc[microbatch.index, : rows + 1],
            seq_lens=split_seq_lens[microbatch.index, :rows],
            block_table=attention.block_table[reqs],
            slot_mapping=attention.slot_mapping[tokens],
            max_query_len=uniform or min(attention.max_query_len, microbatch.num_tokens),
            max_seq_len=attention.max_seq_len,
        ),
        tokens_per_rank=tuple(
            _clamp(count - tokens.start, microbatch.num_tokens) for count in context.tokens_per_rank
        ),
        handoff=handoff,
    )


def _slices(
    starts: IntArray, num_tokens: int, count: int, num_reqs: int
) -> tuple[tuple[slice, slice], ...]:
    """Requests and tokens of each part, from the first token of each request [r]."""
    width = num_tokens // count
    begins = [index * width for index in range(count)]
    ends = [*begins[1:], num_tokens]
    firsts = np.maximum(np.searchsorted(starts, begins, side="right") - 1, 0).tolist()
    stops = np.searchsorted(starts, ends, side="left").tolist()
    stops[-1] = num_reqs
    reqs, tokens = zip(firsts, stops, strict=True), zip(begins, ends, strict=True)
    return tuple((slice(*r), slice(*t)) for r, t in zip(reqs, tokens, strict=True))


@lru_cache(maxsize=1024)
def _uniform_slices(
    query_len: int, num_tokens: int, count: int, num_reqs: int
) -> tuple[tuple[slice, slice], ...]:
    """The same under a uniform key, whose padding rows are laid out like real ones."""
    starts = np.arange(num_reqs, dtype=np.int32) * np.int32(query_len)
    return _slices(starts, num_tokens, count, num_reqs)


def _spread_parts(
    slices: Sequence[tuple[slice, slice]], spread: Sequence[Region]
) -> tuple[Microbatch, ...]:
    """The parts of one-token requests that lie at the start of each part's rows."""
    return tuple(
        Microbatch(
            index=index,
            req_slice=reqs,
            token_slice=tokens,
            num_real_tokens=region.num_tokens,
            tokens_before=region.first_token,
        )
        for index, ((reqs, tokens), region) in enumerate(zip(slices, spread, strict=True))
    )


def _check_fits(part: Microbatch, starts: Sequence[int], lens: Sequence[int]) -> None:
    """Refuses a microbatch whose row, [M, R+1] and [M, R], does not exist or is too short."""
    microbatches, reqs = min(starts[0], lens[0]), min(starts[1] - 1, lens[1])
    if part.index >= microbatches or part.num_reqs > reqs:
        raise MicrobatchError(
            part.index,
            f"{part.num_reqs} requests do not fit the buffers of {microbatches} microbatches "
            f"of {reqs} requests",
        )


def _slice_shape(shape: BatchShape, part: Microbatch) -> BatchShape:
    """The real part of a microbatch; prefills are the last of a step's requests."""
    first, stop = part.req_slice.start, min(part.req_slice.stop, shape.num_reqs)
    if shape.uniform_query_len == 1:
        # Requests are tokens, also where they are spread.
        stop = first + part.num_real_tokens
    elif not part.num_real_tokens:
        stop = first
    prefills = stop - max(first, shape.num_reqs - shape.num_prefills)
    return BatchShape(
        num_reqs=stop - first,
        num_tokens=part.num_real_tokens,
        max_query_len=min(shape.max_query_len, part.num_real_tokens),
        num_prefills=_clamp(prefills, shape.num_prefills),
    )


def _slice_key(key: GraphKey, part: Microbatch) -> GraphKey:
    uniform = key.uniform_query_len
    whole = uniform is not None and uniform * part.num_reqs == part.num_tokens
    return GraphKey(
        mode=key.mode,
        num_tokens=part.num_tokens,
        num_reqs=None if key.num_reqs is None else part.num_reqs,
        uniform_query_len=uniform if whole else None,
    )


def _clamp(value: int, high: int) -> int:
    return max(0, min(value, high))
