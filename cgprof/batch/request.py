"""Requests, and the table that gives each one a persistent row of host arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cgprof.errors import ConfigError

IntArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a client asks for. Greedy when `temperature` is 0, else sampled from `seed`."""

    request_id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    stop_token: int | None = None


class RequestTable:
    """One row a running request; rows are reused after `remove`.

    `token_ids[row, :num_tokens[row]]` is the prompt and what was generated;
    `num_computed[row]` of them are in the KV cache. Row order means nothing.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_prompt = np.zeros(max_num_seqs, np.int32)
        self.num_computed = np.zeros(max_num_seqs, np.int32)
        self.max_tokens = np.zeros(max_num_seqs, np.int32)
        self.stop_token = np.full(max_num_seqs, -1, np.int64)
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.seed = np.zeros(max_num_seqs, np.int64)
        self.requests: dict[int, Request] = {}
        self._free = list(range(max_num_seqs - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Rows that a new request could take."""
        return len(self._free)

    def check(self, request: Request) -> None:
        """Refuses a request that no free row could hold.

        Raises:
            ConfigError: An empty prompt, or more tokens than max_model_len.
        """
        length = len(request.prompt)
        where = f"request {request.request_id}"
        if not length:
            raise ConfigError(where, "the prompt is empty")
        if length + request.max_new_tokens > self.max_model_len:
            raise ConfigError(
                where,
                f"{length} prompt + {request.max_new_tokens} new tokens exceed "
                f"max_model_len {self.max_model_len}",
            )

    def add(self, request: Request) -> int:
        """Gives the request a row and returns it.

        Raises:
            ConfigError: No free row, an empty prompt, or more tokens than max_model_len.
        """
        if not self._free:
            raise ConfigError(
                f"request {request.request_id}",
                f"all {self.max_num_seqs} rows (max_num_seqs) are taken",
            )
        self.check(request)
        length = len(request.prompt)
        row = self._free.pop()
        self.token_ids[row, :length] = request.prompt
        self.num_tokens[row] = self.num_prompt[row] = length
        self.num_computed[row] = 0
        self.max_tokens[row] = length + request.max_new_tokens
        self.stop_token[row] = -1 if request.stop_token is None else request.stop_token
        self.temperature[row] = request.temperature
        self.seed[row] = request.seed
        self.requests[row] = request
        return row

    def remove(self, row: int) -> Request:
        """Frees a row and returns its request."""
        request = self.requests.pop(row)
        self.num_tokens[row] = self.num_prompt[row] = self.num_computed[row] = 0
        self._free.append(row)
        return request

    def append(self, rows: IntArray, tokens: NDArray[np.int64]) -> None:
        """Appends one sampled token to each row [r]."""
        self.token_ids[rows, self.num_tokens[rows]] = tokens
        self.num_tokens[rows] += 1
