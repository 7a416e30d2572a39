"""The requests of a greedy run and when each arrives: seeded, and the same for every mode."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cgprof.batch.request import Request
from cgprof.config.schema import Limits
from cgprof.errors import ConfigError

LEAST_STEPS = 64
_IDENTICAL = 8
_IDENTICAL_PROMPT = 12
_MEAN_PROMPT = 48
_LATE_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request and the step before which it comes."""

    step: int
    request: Request


def make_schedule(
    limits: Limits, vocab_size: int, *, steps: int, num_blocks: int, seed: int
) -> tuple[Arrival, ...]:
    """Returns arrivals that keep the engine busy for at least `steps` steps.

    - Identical prompts come first, together, and stay for all of the run.
    - One prompt fills what `max_model_len` leaves, far beyond what graphs were captured with.
    - The others end one after the other, so that the batch shrinks through every size.
    - Later ones come one by one, some with a prompt of one token, beside those that decode.

    Args:
        limits: The scheduler's.
        vocab_size: Prompts are random tokens below it.
        steps: Tokens that the longest requests generate.
        num_blocks: KV blocks that one request can have.
        seed: Of prompts and lengths.

    Raises:
        ConfigError: Fewer steps than make a check, or more than a request may have.
    """
    room = min(limits.max_model_len, num_blocks * limits.block_size)
    check_steps(steps, room)
    rng = np.random.default_rng(seed)
    rows = limits.max_num_seqs
    same = min(_IDENTICAL, rows // 2) if rows >= 4 else 0
    prompt = _prompt(rng, vocab_size, _IDENTICAL_PROMPT)
    arrivals = [_arrival(0, f"same-{index}", prompt, steps) for index in range(same)]
    long = _prompt(rng, vocab_size, room - steps)
    arrivals.append(_arrival(2, "long", long, steps))
    first, late = max(rows - same - 1, 0), -(-rows // 2)
    for index, length in enumerate(_lengths(rng, first, room - steps)):
        new = 1 + index * (steps - 1) // first
        arrivals.append(_arrival(0, f"first-{index}", _prompt(rng, vocab_size, length), new))
    for index, length in enumerate(_lengths(rng, late, room - steps)):
        step = steps // 3 + index * (steps - steps // 3) // late
        made = _prompt(rng, vocab_size, 1 if index % 4 == 0 else length)
        arrivals.append(_arrival(step, f"late-{index}", made, 1 + index % _LATE_TOKENS))
    return tuple(sorted(arrivals, key=lambda arrival: arrival.step))


def check_steps(steps: int, room: int) -> None:
    """Refuses a run that is too short to show anything, or longer than a request of `room` tokens.

    Raises:
        ConfigError: It is one of the two.
    """
    where = "--greedy-steps"
    if steps < LEAST_STEPS:
        raise ConfigError(where, f"{steps} is too short to show anything; at least {LEAST_STEPS}")
    if steps + _IDENTICAL_PROMPT > room:
        raise ConfigError(
            where,
            f"{steps} steps and a prompt of {_IDENTICAL_PROMPT} exceed the {room} tokens that a "
            "request may have; lower it or raise --max-model-len",
        )


def _arrival(step: int, name: str, prompt: tuple[int, ...], new: int) -> Arrival:
    request = Request(request_id=name, prompt=prompt, max_new_tokens=new)
    return Arrival(step=step, request=request)


def _lengths(rng: np.random.Generator, count: int, most: int) -> list[int]:
    lengths: list[int] = np.minimum(rng.geometric(1 / _MEAN_PROMPT, count), most).tolist()
    return lengths


def _prompt(rng: np.random.Generator, vocab_size: int, length: int) -> tuple[int, ...]:
    return tuple(rng.integers(0, vocab_size, length).tolist())
