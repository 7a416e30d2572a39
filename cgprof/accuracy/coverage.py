"""Where scored tokens came from: replays by key, twins among them, and steps without a graph."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cgprof.engine.types import PreparedStep
from cgprof.engine.worker import Engine
from cgprof.shapes import GraphKey, RuntimeMode


class Coverage:
    """Counts from its making until `stop`. Replays are the graph manager's own count."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = self._replays()
        self.tokens: Counter[GraphKey] = Counter()
        self.replays: Counter[GraphKey] = Counter()  # steps, known once stopped

    def add(self, prepared: PreparedStep, num_tokens: int) -> None:
        """Notes that `num_tokens` scored tokens came from a step."""
        self.tokens[prepared.decision.key] += num_tokens

    def stop(self) -> None:
        """Ends the count: what is replayed from here on is not of this run."""
        self.replays = self._replays() - self._before

    def count(self, *, twins: bool) -> int:
        """Returns the scored tokens that came from replays, of twins or of plain keys."""
        replayed = {k: n for k, n in self.tokens.items() if k.mode is not RuntimeMode.NONE}
        return sum(n for key, n in replayed.items() if key.is_twin is twins)

    @property
    def num_eager(self) -> int:
        """The scored tokens that came from steps without a graph."""
        return sum(n for key, n in self.tokens.items() if key.mode is RuntimeMode.NONE)

    @property
    def about(self) -> Literal["plain", "twin"]:
        """Which replays a score of this engine is meant to test: twins where the plan has some."""
        return "twin" if self._engine.plan.twins else "plain"

    def _replays(self) -> Counter[GraphKey]:
        return Counter({key: g.replays for key, g in self._engine.graphs.captured.items()})


def ends_at_last_token(engine: Engine, prepared: PreparedStep) -> NDArray[np.bool_]:
    """Returns for each request [r] whether a token follows from this step, its prompt being done.

    Ask before the scheduler advances.
    """
    step, table = prepared.step, engine.table
    computed = table.num_computed[step.rows] + step.query_lens
    ends: NDArray[np.bool_] = computed == table.num_tokens[step.rows]
    return ends
