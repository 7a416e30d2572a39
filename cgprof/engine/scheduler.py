"""Continuous batching with chunked prefill: which requests run how many tokens in the next step.

First come, first served: all running requests are older than all paused ones, and these older than
all waiting ones. A request holds the blocks of its whole prompt from its first step on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cgprof.batch.request import IntArray, Request, RequestTable
from cgprof.config.schema import Limits
from cgprof.engine.types import Step
from cgprof.errors import ConfigError
from cgprof.kvcache.block_table import BlockTable
from cgprof.shapes import BatchShape


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """A request that is done, and what it generated."""

    request: Request
    output: tuple[int, ...]


class Scheduler:
    """Owns the rows that it adds to the request table, and their blocks.

    Call `schedule` and `advance` in turn. A request that has to give up its blocks is paused: it
    keeps its row and its tokens, and computes them again later.
    """

    def __init__(self, table: RequestTable, block_table: BlockTable, limits: Limits) -> None:
        self._table = table
        self._block_table = block_table
        self._budget = limits.max_num_batched_tokens
        self._block_size = limits.block_size
        self._running = np.zeros(0, np.int32)  # rows that hold blocks, oldest first
        self._paused: deque[int] = deque()  # rows without blocks, oldest first
        self._waiting: deque[Request] = deque()
        # A row samples only from here on; after a pause this includes what it had generated.
        self._prefill_len = np.zeros(table.max_num_seqs, np.int32)
        self._ones = np.ones(table.max_num_seqs, np.int32)
        self._ones.setflags(write=False)  # steps hold views of it
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is running, paused or waiting."""
        return bool(self._running.size or self._paused or self._waiting)

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ConfigError: It could never run: too long, nothing to generate, or too few blocks.
        """
        self.check(request)
        self._waiting.append(request)

    def check(self, request: Request) -> None:
        """Refuses a request that could never run.

        Raises:
            ConfigError: It is too long, generates nothing, or needs more blocks than there are.
        """
        self._table.check(request)
        where = f"request {request.request_id}"
        if request.max_new_tokens < 1:
            raise ConfigError(
                where, f"max_new_tokens is {request.max_new_tokens}; ask for 1 or more"
            )
        # The last token is never computed, so it needs no slot.
        needed = self._blocks_for(len(request.prompt) + request.max_new_tokens - 1)
        capacity = self._block_table.pool.num_blocks - 1
        if needed > capacity:
            raise ConfigError(
                where,
                f"needs {needed} KV blocks of {self._block_size} tokens, the cache has {capacity}; "
                "shorten it or raise --num-gpu-blocks-override",
            )

    def schedule(self) -> Step | None:
        """Returns the next step, decodes first and oldest first, or None when there is no work.

        Running decodes come before prompt chunks, these before paused and then waiting requests.
        Rows, tokens and blocks bound the step, blocks last.

        Raises:
            ConfigError: Requests wait, none runs, and rows or blocks are held by others.
        """
        decodes, chunks = self._secure_decodes()
        left = self._budget - decodes.size
        chunks = self._admit(chunks, left)
        rows, query_lens = decodes, self._ones[: decodes.size]
        num_tokens, longest = decodes.size, min(decodes.size, 1)
        if chunks.size:
            lens = self._chunk_lens(chunks, left)
            chunks = chunks[: lens.size]
            rows = np.concatenate([decodes, chunks])
            query_lens = np.concatenate([query_lens, lens])
            num_tokens, longest = int(query_lens.sum()), int(query_lens.max())
        if not rows.size:
            self._check_idle()
            return None
        shape = BatchShape(
            num_reqs=rows.size,
            num_tokens=num_tokens,
            max_query_len=longest,
            num_prefills=chunks.size,
        )
        return Step(rows=rows, query_lens=query_lens, shape=shape)

    def advance(self, step: Step, tokens: NDArray[np.int64]) -> list[FinishedRequest]:
        """Records that the step ran and returns the requests that it finished.

        Args:
            step: What `schedule` returned last.
            tokens: One sampled token a request [r]; dropped where the prompt is not finished.
        """
        table, rows = self._table, step.rows
        computed = table.num_computed[rows] + step.query_lens
        table.num_computed[rows] = computed
        if step.shape.num_prefills:
            sampled = computed == table.num_tokens[rows]
            rows, tokens, computed = rows[sampled], tokens[sampled], computed[sampled]
        table.append(rows, tokens)
        at_end = computed + 1 == table.max_tokens[rows]
        done = rows[at_end | (tokens == table.stop_token[rows])]
        if not done.size:
            return []
        self._running = self._running[~np.isin(self._running, done)]
        return [self._finish(int(row)) for row in done]

    def clear(self) -> None:
        """Drops all requests, whatever they were doing, and frees their rows and blocks."""
        for row in [*self._running.tolist(), *self._paused]:
            self._block_table.release(row)
            self._table.remove(row)
        self._running = self._running[:0]
        self._paused.clear()
        self._waiting.clear()

    def _finish(self, row: int) -> FinishedRequest:
        table = self._table
        output = table.token_ids[row, table.num_prompt[row] : table.num_tokens[row]]
        generated = tuple(output.tolist())
        self._block_table.release(row)
        return FinishedRequest(request=table.remove(row), output=generated)

    def _secure_decodes(self) -> tuple[IntArray, IntArray]:
        """Returns running decodes, each with a slot for its token, and running prompts.

        The youngest requests are paused as long as blocks are missing.
        """
        while True:
            running = self._running
            computed = self._table.num_computed[running]
            is_prompt = computed < self._prefill_len[running]
            is_decode = ~is_prompt
            decodes = running[is_decode][: self._budget]
            computed = computed[is_decode][: self._budget]
            full = computed >= self._block_table.num_blocks[decodes] * self._block_size
            missing = np.count_nonzero(full)
            if missing <= self._block_table.pool.num_free:
                if missing:
                    self._block_table.ensure(decodes[full], computed[full] + 1)
                return decodes, running[is_prompt]
            self._pause_youngest()

    def _pause_youngest(self) -> None:
        row = int(self._running[-1])
        self._running = self._running[:-1]
        self._paused.appendleft(row)
        self._block_table.release(row)
        self._table.num_computed[row] = 0
        self._prefill_len[row] = self._table.num_tokens[row]
        self.num_preemptions += 1

    def _admit(self, chunks: IntArray, left: int) -> IntArray:
        """Returns the prompts with paused, then waiting ones added while any of `left` remains."""
        if not self._paused and not (self._waiting and self._table.num_free):
            return chunks
        left -= int(self._remaining(chunks).sum())
        admitted: list[int] = []
        while left > 0 and self._paused and self._has_room(self._prefill_len[self._paused[0]]):
            admitted.append(self._paused.popleft())
            left -= self._start(admitted[-1])
        while left > 0 and not self._paused and self._waiting and self._table.num_free:
            length = len(self._waiting[0].prompt)
            if not self._has_room(length):
                break
            admitted.append(self._table.add(self._waiting.popleft()))
            self._prefill_len[admitted[-1]] = length
            left -= self._start(admitted[-1])
        rows = np.array(admitted, np.int32)
        self._running = np.concatenate([self._running, rows])
        return np.concatenate([chunks, rows])

    def _start(self, row: int) -> int:
        """Takes the blocks of a whole prompt and returns its length."""
        rows = np.array([row], np.int32)
        self._block_table.ensure(rows, self._prefill_len[rows])
        return int(self._prefill_len[row])

    def _chunk_lens(self, chunks: IntArray, left: int) -> IntArray:
        """Returns how many of `left` tokens each prompt runs, oldest first; the rest get none."""
        wanted = self._remaining(chunks)
        before = np.cumsum(wanted) - wanted
        lens: IntArray = np.clip(left - before, 0, wanted).astype(np.int32)
        return lens[lens > 0]

    def _has_room(self, length: int) -> bool:
        return self._blocks_for(length) <= self._block_table.pool.num_free

    def _check_idle(self) -> None:
        waiting = len(self._paused) + len(self._waiting)
        if waiting:
            pool = self._block_table.pool
            blocks = f"{pool.num_free} of {pool.num_blocks - 1} KV blocks"
            raise ConfigError(
                "scheduler",
                f"{waiting} requests wait and none runs: {self._table.num_free} of "
                f"{self._table.max_num_seqs} rows and {blocks} are free, requests of someone else "
                "hold the rest; remove them",
            )

    def _remaining(self, rows: IntArray) -> IntArray:
        return self._prefill_len[rows] - self._table.num_computed[rows]

    def _blocks_for(self, length: int) -> int:
        return -(-int(length) // self._block_size)
