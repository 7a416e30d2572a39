"""What the shared graph pool takes: the tensors alive at the fullest moments, laid into segments.

Pure. The moments follow the order in which the decoder allocates; what a pass frees, the next
layer and the next graph use again, so a pool is as large as its fullest graph needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from cgprof.config.schema import ModelConfig, RunConfig
from cgprof.graphs.passes import ITEM_BYTES, ExchangeKind, Pass, exchange_kind, passes_of
from cgprof.shapes import GraphKey

_MIB = 1024**2
# Source: torch's CUDACachingAllocator: sizes are rounded to 512 bytes; up to 1 MiB they lie in
# segments of 2 MiB, below 10 MiB in segments of 20 MiB, others in their own of whole 2 MiB.
_ROUND_BYTES = 512
_SMALL_BYTES, _SMALL_SEGMENT_BYTES = _MIB, 2 * _MIB
_LARGE_BYTES, _LARGE_SEGMENT_BYTES = 10 * _MIB, 20 * _MIB
_ID_BYTES = 4  # of an expert id, a weight, a row number or a place

Moment = tuple[int, ...]  # bytes of tensors that are alive at once, in order of allocation


def pool_bytes(model: ModelConfig, run: RunConfig, keys: Iterable[GraphKey]) -> int:
    """Returns the segments of a pool that the keys share, captured in this order."""
    segments: list[int] = []
    for key in keys:
        for moment in moments(model, run, key):
            _lay(moment, segments)
    return sum(segments)


def logits_bytes(model: ModelConfig, num_reqs: int) -> int:
    """Returns the segments of a pool that holds the logits of so many requests alone."""
    segments: list[int] = []
    _lay((num_reqs * model.vocab_size * ITEM_BYTES[model.dtype],), segments)
    return sum(segments)


def moments(model: ModelConfig, run: RunConfig, key: GraphKey) -> tuple[Moment, ...]:
    """Returns the fullest moments of a graph; in a twin the other passes wait in an exchange."""
    kind = exchange_kind(model, run)
    passes = passes_of(model, run, key)
    found = []
    for one in passes:
        waiting = [
            size for other in passes if other is not one for size in _waiting(model, kind, other)
        ]
        found += [(*waiting, *moment) for moment in _moments(model, kind, one)]
    return tuple(found)


def _moments(model: ModelConfig, kind: ExchangeKind, one: Pass) -> Iterator[Moment]:
    item, tokens = ITEM_BYTES[model.dtype], one.num_tokens
    hidden = tokens * model.hidden_size * item
    entering = (hidden,) * 3  # residual, its norm, what the layer before added
    queries = tokens * model.num_heads * model.head_dim
    heads = (tokens * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim * item,)
    partial: Moment = ()
    if one.num_splits > 1:
        partial = (one.num_splits * queries * 4, one.num_splits * tokens * model.num_heads * 4)
    yield (*entering, *heads, queries * item, *partial)
    yield (*entering, *heads, queries * item, hidden)
    if not model.is_moe:
        width = tokens * model.ffn_size * item
        yield (*entering, 2 * width, width)
        yield (*entering, width, hidden)
        return
    rows = one.expert_rows * model.experts_per_token
    groups = 2 * rows * _ID_BYTES  # rows of blocks, with their padding
    inner = (rows * model.expert_ffn_size * item, rows * model.hidden_size * item)
    sums = one.expert_rows * model.hidden_size * item
    yield (*entering, *_routed(model, kind, one), groups, *inner, sums)
    yield _waiting(model, kind, one)


def _routed(model: ModelConfig, kind: ExchangeKind, one: Pass) -> Moment:
    """Ids and weights of a pass, and what its exchange brought."""
    width = model.experts_per_token * _ID_BYTES
    ids = (one.num_tokens * width,) * 2
    if kind is ExchangeKind.LOOPBACK:
        hidden = one.num_tokens * model.hidden_size * ITEM_BYTES[model.dtype]
        return (*ids, hidden, *ids)
    if kind is ExchangeKind.NONE:
        return ids
    received = (one.expert_rows * width,) * 2  # hidden states lie in buffers outside the pool
    places = one.num_tokens * (one.expert_rows // one.block_rows) * _ID_BYTES
    return (*ids, places, *received) if kind.has_blocks else (*ids, *received)


def _waiting(model: ModelConfig, kind: ExchangeKind, one: Pass) -> Moment:
    """What lives while the experts' sums are on their way home."""
    row = model.hidden_size * ITEM_BYTES[model.dtype]
    hidden = one.num_tokens * row
    alive = (*(hidden,) * 3, *_routed(model, kind, one), one.expert_rows * row)
    if kind is ExchangeKind.NONE:
        return alive
    return (*alive, one.block_rows * row if kind is ExchangeKind.ALL_GATHER else hidden)


def _lay(moment: Sequence[int], segments: list[int]) -> None:
    """Puts each tensor into the fullest segment that has room, or adds a segment for it."""
    free = list(segments)
    for size in moment:
        rounded = -(-size // _ROUND_BYTES) * _ROUND_BYTES
        is_small = rounded <= _SMALL_BYTES
        fitting = [
            index
            for index, room in enumerate(free)
            if room >= rounded and (segments[index] == _SMALL_SEGMENT_BYTES) is is_small
        ]
        if fitting:
            index = min(fitting, key=lambda index: free[index])
            free[index] -= rounded
            continue
        segments.append(_segment_bytes(rounded))
        free.append(segments[-1] - rounded)


def _segment_bytes(rounded: int) -> int:
    if rounded <= _SMALL_BYTES:
        return _SMALL_SEGMENT_BYTES
    if rounded < _LARGE_BYTES:
        return _LARGE_SEGMENT_BYTES
    return -(-rounded // _SMALL_SEGMENT_BYTES) * _SMALL_SEGMENT_BYTES
