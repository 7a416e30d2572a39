"""Generated arithmetic problems with answers, split into disjoint train and held-out parts. Pure.

Answers are written least significant digit first, so that each digit follows from the digits
before it: 58+67= is answered by 521.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Literal

from cgprof.errors import ConfigError

Split = Literal["train", "held-out"]

MOST_DIGITS = 4
_HELD_OUT_ONE_IN = 10
_MOST_PROBLEMS = 1_000_000  # well below the distinct problems of either part


@dataclass(frozen=True, slots=True)
class Problem:
    """A question such as `58+67=` and its whole answer, without the token that ends it."""

    question: str
    answer: str


def problems(count: int, *, seed: int, split: Split) -> list[Problem]:
    """Returns distinct sums and differences of numbers of 1 to 4 digits, of mixed lengths.

    A problem belongs to one part for ever, by a hash of its operator and its unordered operands.

    Raises:
        ConfigError: More problems are asked for than can be drawn.
    """
    if not 0 <= count <= _MOST_PROBLEMS:
        raise ConfigError("problems", f"{count} were asked for; ask for 0 to {_MOST_PROBLEMS}")
    rng = random.Random(f"{split}:{seed}")
    drawn: dict[str, Problem] = {}
    while len(drawn) < count:
        left, right = _number(rng), _number(rng)
        operator = rng.choice("+-")
        if operator == "-" and left < right:
            left, right = right, left
        if split_of(left, operator, right) == split:
            problem = _problem(left, operator, right)
            drawn[problem.question] = problem
    return list(drawn.values())


def split_of(left: int, operator: str, right: int) -> Split:
    """Returns the part that a problem belongs to; the order of the operands does not matter."""
    low, high = sorted((left, right))
    digest = hashlib.sha256(f"{low}{operator}{high}".encode()).digest()
    return "train" if int.from_bytes(digest[:8], "big") % _HELD_OUT_ONE_IN else "held-out"


def _number(rng: random.Random) -> int:
    digits = rng.randint(1, MOST_DIGITS)
    return rng.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1)


def _problem(left: int, operator: str, right: int) -> Problem:
    value = left + right if operator == "+" else left - right
    return Problem(question=f"{left}{operator}{right}=", answer=str(value)[::-1])
