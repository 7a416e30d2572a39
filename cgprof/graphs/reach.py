"""Which captured graphs a step can ever replay. Pure: it asks the rule that decides steps."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from cgprof.config.schema import Limits, MicrobatchConfig
from cgprof.graphs.dispatch import decide, vote
from cgprof.shapes import BatchShape, GraphKey


def reaching_batch(
    key: GraphKey,
    keys: Collection[GraphKey],
    limits: Limits,
    config: MicrobatchConfig,
    *,
    query_lens: Sequence[int] = (1,),
) -> BatchShape | None:
    """Returns a batch that replays `key` where `keys` are captured, or None.

    Each rank runs that same batch. It is the largest that the key covers: a smaller one is below
    more thresholds, leaves more microbatches empty and fits more of the other keys.
    """
    for shape in _largest_batches(key, limits, query_lens):
        if key.covers(shape) and decide([vote(shape, keys, config)], keys, config).key == key:
            return shape
    return None


def _largest_batches(
    key: GraphKey, limits: Limits, query_lens: Sequence[int]
) -> Iterator[BatchShape]:
    most_reqs = min(key.num_reqs or limits.max_num_seqs, limits.max_num_seqs)
    most_tokens = min(key.num_tokens, limits.max_num_batched_tokens)
    for query_len in query_lens:
        num_reqs = min(most_reqs, most_tokens // query_len)
        if num_reqs:
            yield BatchShape(
                num_reqs=num_reqs, num_tokens=num_reqs * query_len, max_query_len=query_len
            )
    yield BatchShape(num_reqs=1, num_tokens=most_tokens, max_query_len=most_tokens, num_prefills=1)
