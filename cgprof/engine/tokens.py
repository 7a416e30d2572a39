"""Sampled tokens on their way to the host: a ring of pinned buffers."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

_TOKEN_SLOTS = 8


class PendingTokens:
    """Sampled tokens on their way to the host; valid for the next few `finish` calls."""

    def __init__(self, host: torch.Tensor, done: torch.cuda.Event | None) -> None:
        self._host = host
        self._done = done

    def is_done(self) -> bool:
        """Whether the copy, and all that was enqueued before it, is done."""
        return self._done is None or self._done.query()

    def wait(self) -> NDArray[np.int64]:
        """Waits for the copy and returns one token a request [r]."""
        if self._done is not None:
            self._done.synchronize()
        tokens: NDArray[np.int64] = self._host.numpy()
        return tokens


class TokenRing:
    """Host buffers for sampled tokens, used in turn; on the stream that is current when made."""

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._host = [
            torch.zeros(max_num_reqs, dtype=torch.int64, pin_memory=on_gpu)
            for _ in range(_TOKEN_SLOTS)
        ]
        self._done = [torch.cuda.Event() if on_gpu else None for _ in range(_TOKEN_SLOTS)]
        self._stream = torch.cuda.current_stream() if on_gpu else None
        self._next = 0
        self._views: dict[tuple[int, int], torch.Tensor] = {}

    def send(self, tokens: torch.Tensor, num_reqs: int) -> PendingTokens:
        """Enqueues the copy of the first tokens [num_reqs]; nothing waits."""
        index = self._next
        self._next = (index + 1) % _TOKEN_SLOTS
        host, done = self._views.get((index, num_reqs)), self._done[index]
        if host is None:
            host = self._views[index, num_reqs] = self._host[index][:num_reqs]
        host.copy_(tokens if tokens.shape[0] == num_reqs else tokens[:num_reqs], non_blocking=True)
        if done is not None:
            done.record(self._stream)
        return PendingTokens(host, done)
