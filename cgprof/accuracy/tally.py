"""Counts of one parity leg over the cases of a key, and the record made of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from cgprof.record.graph import ParityResult

Leg = Literal["replay-eager", "step-reference", "poisoned-padding"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one pass produced for its real rows."""

    hidden: torch.Tensor  # [t, D]
    tokens: NDArray[np.int64]  # [r]


@dataclass(slots=True)
class Tally:
    """Counts of one leg over the cases of a key."""

    leg: Leg
    bitwise_equal: bool = True
    max_abs_diff: float = 0.0
    nonfinite: int = 0
    tokens_compared: int = 0
    tokens_different: int = 0
    replays: int = 0
    cases: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)  # what else went wrong, in words

    def compare(self, outcome: Outcome, expected: Outcome, case: str) -> None:
        """Adds one case."""
        mine, other = outcome.hidden, expected.hidden
        self.bitwise_equal &= torch.equal(_bits(mine), _bits(other))
        finite = mine.isfinite() & other.isfinite()
        self.nonfinite += int((~mine.isfinite()).sum())
        gap = torch.where(finite, mine.float() - other.float(), 0.0).abs()
        self.max_abs_diff = max(self.max_abs_diff, float(gap.max()))
        self.tokens_compared += len(outcome.tokens)
        self.tokens_different += int((outcome.tokens != expected.tokens).sum())
        if case not in self.cases:
            self.cases.append(case)

    def result(
        self, passed: bool, *, tolerance: float | None = None, floor: float | None = None
    ) -> ParityResult:
        """Returns the record; without a replay there is no verdict."""
        unverified = [] if self.replays else ["not verified: nothing was replayed"]
        return ParityResult(
            leg=self.leg,
            passed=passed if self.replays else None,
            bitwise_equal=self.bitwise_equal and self.replays > 0,
            max_abs_diff=None if self.nonfinite or not self.replays else self.max_abs_diff,
            tolerance=tolerance,
            floor=floor,
            nonfinite=self.nonfinite,
            tokens_compared=self.tokens_compared,
            tokens_different=self.tokens_different,
            replays=self.replays,
            cases=tuple(self.cases),
            note="; ".join([*unverified, *self.notes, *self.faults]),
        )

    @property
    def is_exact(self) -> bool:
        """Whether all cases were equal bit by bit, tokens too, and finite."""
        return self.bitwise_equal and not self.tokens_different and not self.nonfinite


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int16 if values.dtype.itemsize == 2 else torch.int32)
