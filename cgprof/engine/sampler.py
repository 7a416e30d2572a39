"""Greedy and seeded sampling. All shapes are fixed by the batch and nothing waits for the device.

A random token depends on its request's seed and position only, never on the batch around it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

_DRAW_BITS = 24  # a float32 holds every multiple of 2**-24 in [0, 1) exactly
_WEIGHT_BITS = 30  # summed weights of a row stay below 2**31
# Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def greedy(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the largest logit's token of each row [r] i64, in `out` if given.

    logits: [r, V] of any float type.
    """
    return torch.argmax(logits, dim=-1, out=out)


def sample(logits: torch.Tensor, temperature: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Returns one token a row: the largest logit, or the inverse CDF of the softmax at the draw.

    Weights are summed as integers, so that no order of summation can change a token.

    Args:
        logits: [r, V] of any float type.
        temperature: [r] float32; 0 means greedy, the lowest index of equal logits wins.
        draws: [r] float32 in [0, 1).

    Returns:
        [r] int64.
    """
    is_random = temperature > 0
    divisor = torch.where(is_random, temperature, 1.0).unsqueeze(1)
    wide = logits.to(torch.float32)
    # The maximum goes first: a small temperature must not overflow.
    scaled = (wide - wide.amax(dim=-1, keepdim=True)) / divisor
    weights = (scaled.softmax(dim=-1) * 2.0**_WEIGHT_BITS).to(torch.int32)
    summed = weights.cumsum(dim=-1, dtype=torch.int32)
    ticks = (draws.unsqueeze(1) * 2.0**_DRAW_BITS).to(torch.int64)
    target = (ticks * summed[:, -1:] >> _DRAW_BITS).to(torch.int32)
    picked = torch.searchsorted(summed, target, right=True).squeeze(1)
    return torch.where(is_random, picked.clamp(max=logits.shape[-1] - 1), greedy(logits))


def uniform_draws(seeds: NDArray[np.int64], positions: NDArray[np.integer]) -> NDArray[np.float32]:
    """Returns a number in [0, 1) a request [r], a hash of its seed and position alone."""
    keys = _mix(seeds.astype(np.uint64) * _GOLDEN + _GOLDEN)
    bits = _mix(keys + positions.astype(np.uint64) * _GOLDEN)
    return (bits >> np.uint64(64 - _DRAW_BITS)).astype(np.float32) * np.float32(2.0**-_DRAW_BITS)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))
