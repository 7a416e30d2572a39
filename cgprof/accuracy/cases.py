"""Which batches a key is checked with: contexts, request mixes, a buffer that shrinks and grows.

All cases of all keys are steps of one filling of the request table, so that contexts are computed
once and not once a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from cgprof.config.schema import Limits
from cgprof.engine.live import spread
from cgprof.microbatch.rule import last_microbatch_is_empty
from cgprof.shapes import GraphKey

_LONG = 512  # contexts above this are given to one request each


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """Live requests: what each has computed, and how many of its next tokens a step may run."""

    contexts: tuple[int, ...]
    query_lens: tuple[int, ...]
    num_mixed: int  # the first requests, which have every context once


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityCase:
    """One step: indices into the filling, and the tokens that each request runs."""

    kind: str
    indices: tuple[int, ...]
    query_lens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Real tokens of the step."""
        return sum(self.query_lens)

    def is_padded(self, key: GraphKey) -> bool:
        """Whether the key has rows that this case does not use."""
        fewer = key.num_reqs is not None and len(self.indices) < key.num_reqs
        return fewer or self.num_tokens < key.num_tokens

    def describe(self, filling: Filling) -> str:
        """One line for the record: kind, size and the contexts in it."""
        contexts = sorted({filling.contexts[index] for index in self.indices})
        words = " ".join(map(str, contexts))
        size = f"{len(self.indices)} requests, {self.num_tokens} tokens"
        return f"{self.kind}: {size}, contexts {words}"


def make_filling(
    keys: Sequence[GraphKey],
    limits: Limits,
    contexts: Sequence[int],
    *,
    num_blocks: int,
    max_varied: int,
) -> Filling:
    """Returns requests that serve every case of these keys.

    Every context occurs once, clipped to max_model_len; the short ones repeat until `max_varied`
    requests have one, all others get the shortest. Contexts that `num_blocks` cannot hold are
    given up, longest first.
    """
    count = limits.max_num_seqs
    each = max((-(-key.num_tokens // (key.num_reqs or key.num_tokens)) for key in keys), default=1)
    each = min(each, limits.max_model_len - 1)
    whole = max((key.num_tokens for key in keys if key.uniform_query_len is None), default=1)
    # The first request can hold a whole key by itself, if max_model_len allows one token before it.
    query_lens = [max(each, min(whole, limits.max_model_len - 1))] + [each] * (count - 1)
    wanted = sorted({min(context, limits.max_model_len - each) for context in contexts})
    short = [context for context in wanted if context <= _LONG] or wanted[:1]
    varied = list(islice(wanted + list(islice(cycle(short), max_varied)), max_varied))
    chosen = (varied + wanted[:1] * count)[:count]
    chosen[0] = min(chosen[0], limits.max_model_len - query_lens[0])
    _shrink(chosen, query_lens, limits.block_size, num_blocks)
    return Filling(
        contexts=tuple(chosen),
        query_lens=tuple(query_lens),
        num_mixed=min(len(wanted), count, max_varied),
    )


def cases_for(key: GraphKey, filling: Filling) -> tuple[ParityCase, ...]:
    """Returns the cases of a key in the order in which they must run.

    Full batches run at least twice before a smaller one, and once more after it: whatever a large
    one left in a buffer or a staging slot then lies under the padding of the small one.
    """
    available = len(filling.contexts)
    num_reqs = min(key.num_reqs or key.num_tokens, available)
    lens = tuple(min(n, filling.query_lens[-1]) for n in spread(key.num_tokens, num_reqs))
    starts = range(0, filling.num_mixed, num_reqs)
    full = [
        ParityCase(
            kind="full",
            indices=tuple((start + i) % available for i in range(num_reqs)),
            query_lens=lens,
        )
        for start in starts
    ]
    cases = [] if key.uniform_query_len else _unlike_lengths(key, filling, num_reqs)
    cases += full
    fewer = fewest_requests(key, lens)
    if fewer < num_reqs:
        indices = full[0].indices[::-1][:fewer]
        shrunk = ParityCase(kind="shrunk", indices=indices, query_lens=lens[:fewer])
        cases += [full[0], shrunk, full[0]]
    return tuple(cases)


def fewest_requests(key: GraphKey, query_lens: Sequence[int]) -> int:
    """Returns how few requests a small batch of this key has.

    3 of 8 for a plain key; for a twin as few as leave one real token in the last microbatch.
    """
    if key.num_microbatches == 1:
        return max(1, len(query_lens) * 3 // 8)
    tokens = 0
    for count, length in enumerate(query_lens, start=1):
        tokens += length
        if not last_microbatch_is_empty(tokens, key.num_tokens, key.num_microbatches):
            return count
    return len(query_lens)


def _unlike_lengths(key: GraphKey, filling: Filling, num_reqs: int) -> list[ParityCase]:
    """All tokens in one request, and a chunk beside decodes, for a key that admits any mix."""
    cases = []
    if 1 < key.num_tokens <= filling.query_lens[0]:
        cases.append(ParityCase(kind="one request", indices=(0,), query_lens=(key.num_tokens,)))
    decodes = min(num_reqs - 1, key.num_tokens // 2)
    chunk = key.num_tokens - decodes
    if decodes and 1 < chunk <= filling.query_lens[0]:
        cases.append(
            ParityCase(
                kind="chunk beside decodes",
                indices=(*range(1, decodes + 1), 0),
                query_lens=(*[1] * decodes, chunk),
            )
        )
    return cases


def _shrink(
    contexts: list[int], query_lens: Sequence[int], block_size: int, num_blocks: int
) -> None:
    def blocks(index: int) -> int:
        return -(-(contexts[index] + query_lens[index]) // block_size)

    total = sum(map(blocks, range(len(contexts))))
    shortest = min(contexts)
    for index in sorted(range(len(contexts)), key=contexts.__getitem__, reverse=True):
        if total <= num_blocks:
            return
        total -= blocks(index)
        contexts[index] = shortest
        total += blocks(index)
