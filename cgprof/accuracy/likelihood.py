"""Likelihood by forced decoding: gold tokens are fed one a decode step, so that graphs replay.

A likelihood that is scored in prompt passes would test nothing captured. The last prompt token is
fed like a gold one, so that the first gold token is scored by a decode step as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cgprof.accuracy.coverage import Coverage, ends_at_last_token
from cgprof.accuracy.result import ScoreMode
from cgprof.batch.request import Request
from cgprof.engine.engine import serve
from cgprof.engine.types import PreparedStep
from cgprof.engine.worker import Engine
from cgprof.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Forced:
    """A prompt, and the tokens after it whose likelihood is asked; neither is empty."""

    prompt: tuple[int, ...]
    gold: tuple[int, ...]


def forced_log_probs(
    engine: Engine, sequences: Sequence[Forced], mode: ScoreMode
) -> tuple[list[NDArray[np.float32]], Coverage]:
    """Returns the log-probability of each gold token, one array a sequence, and their coverage.

    The steps depend on lengths alone, so both modes run the same ones: as the engine would, or
    each without its graph at the same padding and split. Call inside `engine.active()`.

    Raises:
        ConfigError: A sequence is empty or too long for the engine.
    """
    for index, sequence in enumerate(sequences):
        if not (sequence.prompt and sequence.gold):
            raise ConfigError(f"sequence {index}", "prompt and gold need one token or more each")
    coverage = Coverage(engine)
    scorer = _Scorer(engine, sequences, coverage)
    serve(
        engine,
        scorer.requests(),
        as_eager=mode == "eager",
        choose=scorer.choose,
        refill_below=refill_mark(engine),
    )
    coverage.stop()
    return scorer.log_probs(), coverage


def refill_mark(engine: Engine) -> int:
    """Returns how few requests may be under way before new prompts start: the DBO threshold.

    Plain runs take the same mark, so that their steps are those of a DBO run.
    """
    threshold = engine.config.microbatch.decode_token_threshold
    return max(1, min(threshold, engine.table.max_num_seqs))


class _Scorer:
    """Appends gold tokens in place of sampled ones; scores gather on the device until the end.

    All forced tokens lie in one array, sequence after sequence, and a last place takes what
    padding rows and unfinished prompts would write.
    """

    def __init__(self, engine: Engine, sequences: Sequence[Forced], coverage: Coverage) -> None:
        self._engine = engine
        self._coverage = coverage
        # A prompt of one token cannot give it away: its first gold token ends the prompt pass.
        self._skipped = [min(1, len(s.prompt) - 1) for s in sequences]
        self._sequences = sequences
        forced = [
            s.prompt[len(s.prompt) - skipped :] + s.gold
            for s, skipped in zip(sequences, self._skipped, strict=True)
        ]
        self._starts = np.cumsum([0, *map(len, forced)], dtype=np.int64)
        self._trash = int(self._starts[-1])
        self._forced = np.array([token for part in forced for token in part] + [0], np.int64)
        self._is_gold = np.ones(self._trash + 1, bool)
        self._is_gold[self._starts[:-1][np.array(self._skipped, bool)]] = False
        self._is_gold[-1] = False
        self._forced_on_device = torch.from_numpy(self._forced).to(engine.device)
        self._scores = torch.zeros(self._trash + 1, dtype=torch.float32, device=engine.device)

    def requests(self) -> list[Request]:
        """Returns one request a sequence, named by its index."""
        return [
            Request(
                request_id=str(index),
                prompt=s.prompt[: len(s.prompt) - skipped],
                max_new_tokens=skipped + len(s.gold),
            )
            for index, (s, skipped) in enumerate(zip(self._sequences, self._skipped, strict=True))
        ]

    def choose(self, prepared: PreparedStep, hidden: torch.Tensor) -> NDArray[np.int64]:
        """Enqueues the scores of this step's gold tokens and returns these tokens [r]."""
        places = self._places(prepared)
        self._coverage.add(prepared, int(self._is_gold[places].sum()))
        logits = self._engine.runner.logits(prepared, hidden)
        padded = np.full(logits.shape[0], self._trash, np.int64)
        padded[: places.size] = places
        index = torch.from_numpy(padded)
        if hidden.device.type != "cpu":
            index = index.pin_memory().to(hidden.device, non_blocking=True)
        self._scores[index] = token_log_probs(logits, self._forced_on_device[index])
        return self._forced[places]

    def log_probs(self) -> list[NDArray[np.float32]]:
        """Waits for the device and returns the scores of the gold tokens of each sequence."""
        scores: NDArray[np.float32] = self._scores.cpu().numpy()
        bounds = zip(self._starts, self._starts[1:], self._skipped, strict=False)
        return [scores[start + skipped : end] for start, end, skipped in bounds]

    def _places(self, prepared: PreparedStep) -> NDArray[np.int64]:
        """Where each request's next forced token lies [r]; the last place if none follows."""
        rows, table = prepared.step.rows, self._engine.table
        names = [int(table.requests[row].request_id) for row in rows.tolist()]
        places = self._starts[names] + table.num_tokens[rows] - table.num_prompt[rows]
        return np.where(ends_at_last_token(self._engine, prepared), places, self._trash)


def token_log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the log-softmax of logits [r, V] f32 at one token a row [r]."""
    picked = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return picked - logits.logsumexp(dim=1)
