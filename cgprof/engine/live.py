"""Live requests in a known state: contexts really computed, steps that can be repeated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cgprof.batch.request import Request, RequestTable
from cgprof.config.schema import Limits
from cgprof.engine.step import StepRunner
from cgprof.engine.types import Step
from cgprof.graphs.dispatch import eager_key
from cgprof.kvcache.block_table import BlockTable
from cgprof.shapes import BatchShape, DecisionReason, GraphKey, StepDecision


class LiveRequests:
    """Fills the request table and makes steps of it. A step does not advance its requests."""

    def __init__(
        self,
        runner: StepRunner,
        table: RequestTable,
        block_table: BlockTable,
        limits: Limits,
        vocab_size: int,
    ) -> None:
        self._runner = runner
        self._table = table
        self._block_table = block_table
        self._limits = limits
        self._vocab_size = vocab_size
        self._filled: tuple[tuple[int, ...], tuple[int, ...], int] | None = None
        self._rows = np.zeros(0, np.int32)

    def fill(self, contexts: Sequence[int], query_lens: Sequence[int], seed: int) -> Step:
        """Replaces all requests and returns the step that runs `query_lens` tokens of each.

        Token ids are random, those of the step distinct where the vocabulary allows it. The first
        `contexts[i]` tokens of request i are computed into the KV cache by chunked prefill.
        """
        wanted = (tuple(contexts), tuple(query_lens), seed)
        if wanted != self._filled:
            self.clear()
            rng = np.random.default_rng(seed)
            total = sum(query_lens)
            fresh = _distinct(rng, self._vocab_size, total)
            rows = []
            for index, (context, length) in enumerate(zip(contexts, query_lens, strict=True)):
                prompt = rng.integers(0, self._vocab_size, context).tolist()
                prompt += fresh[sum(query_lens[:index]) :][:length].tolist()
                request = Request(
                    request_id=f"live-{index}", prompt=tuple(prompt), max_new_tokens=0
                )
                rows.append(self._table.add(request))
            self._rows = np.array(rows, np.int32)
            self._block_table.ensure(self._rows, self._table.num_tokens[self._rows])
            self._prefill(np.array(contexts, np.int32))
            self._filled = wanted
        return self.step(query_lens)

    def step(self, query_lens: Sequence[int]) -> Step:
        """Returns the step of the first requests, each running that many of its next tokens."""
        return make_step(self._rows[: len(query_lens)], np.array(query_lens, np.int32))

    def live_step(self, key: GraphKey, context: int, *, most: int, seed: int) -> Step:
        """Returns the full step of a key, one live request a row; `most` query tokens a row exist.

        All keys share one filling, so that steps of several keys can alternate.
        """
        rows = self._limits.max_num_seqs
        self.fill([context] * rows, [most] * rows, seed)
        return self.step(spread(key.num_tokens, key.num_reqs or key.num_tokens))

    def clear(self) -> None:
        """Removes all requests and frees their blocks."""
        for row in list(self._table.requests):
            self._table.remove(row)
            self._block_table.release(row)
        self._filled = None

    def _prefill(self, contexts: NDArray[np.int32]) -> None:
        budget = self._limits.max_num_batched_tokens
        computed = self._table.num_computed
        while True:
            left = contexts - computed[self._rows]
            before = np.cumsum(left) - left
            chunk = np.clip(budget - before, 0, left).astype(np.int32)
            busy = chunk > 0
            if not busy.any():
                return
            step = make_step(self._rows[busy], chunk[busy], num_prefills=int(busy.sum()))
            decision = StepDecision(
                key=eager_key(step.shape.num_tokens),
                tokens_per_rank=(step.shape.num_tokens,),
                reason=DecisionReason.NO_FIT,
            )
            self._runner.launch(self._runner.prepare(step, decision), count=False)
            computed[step.rows] += step.query_lens


def make_step(
    rows: NDArray[np.int32], query_lens: NDArray[np.int32], num_prefills: int | None = None
) -> Step:
    """Returns the step of these rows; by default those of several tokens count as prefills."""
    prefills = int((query_lens > 1).sum()) if num_prefills is None else num_prefills
    shape = BatchShape(
        num_reqs=rows.size,
        num_tokens=int(query_lens.sum()),
        max_query_len=int(query_lens.max(initial=0)),
        num_prefills=prefills,
    )
    return Step(rows=rows, query_lens=query_lens, shape=shape)


def spread(num_tokens: int, num_reqs: int) -> list[int]:
    """Returns query lengths that sum to `num_tokens`, as even as possible, longer ones last."""
    short, longer = divmod(num_tokens, num_reqs)
    return [short] * (num_reqs - longer) + [short + 1] * longer


def _distinct(rng: np.random.Generator, vocab_size: int, count: int) -> NDArray[np.int64]:
    if count <= vocab_size:
        return rng.permutation(vocab_size)[:count]
    return rng.integers(0, vocab_size, count)
