"""How far apart two runs of the same tokens are, and how far apart they may be.

The error of a token is the L2 norm of the difference of its hidden vectors over the norm of the
reference's. Two numbers sum up a batch: the worst token, which shows a fault in few rows, and the
median, which shows a small fault in all rows even where one token's experts flip.

The allowance is four times the floor, which is the same two numbers for two eager references that
differ in prefill chunks and in batch size only: one pass of many requests, and passes of the very
size of the key, since libraries choose kernels by size. Rounding alone separates those two, and
the step differs from either in the same way. Four leaves room for the spread of a maximum over few
tokens. A position off by one moves the median token of the tests' model by 8 percent, a length
short by one by 5. Where the floor is tiny because both references happened to use equal kernels,
the least allowance below holds; no allowance reaches 1, the error of a row of zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FLOOR_FACTOR = 4.0
MOST_ALLOWED = 0.99

# Source: machine epsilon of the dtype, times 16 in float32, where sums over thousands of products
# in another order dominate, and times 4 in 16 bits, where each layer's rounding to the dtype does.
LEAST_ALLOWED = {
    torch.float32: 16 * torch.finfo(torch.float32).eps,
    torch.float16: 4 * torch.finfo(torch.float16).eps,
    torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """How far apart two sets of hidden vectors are."""

    worst: float
    median: float

    def within(self, allowed: Distance) -> bool:
        """Whether both numbers are at most the allowed ones; NaN is not."""
        return self.worst <= allowed.worst and self.median <= allowed.median


def token_errors(hidden: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Returns each token's relative L2 error [t] of `hidden` against `reference`, both [t, D]."""
    wide, wide_reference = hidden.float(), reference.float()
    difference = torch.linalg.vector_norm(wide - wide_reference, dim=-1)
    scale = torch.linalg.vector_norm(wide_reference, dim=-1)
    errors: torch.Tensor = difference / scale.clamp(min=torch.finfo(torch.float32).tiny)
    return errors


def distance(errors: torch.Tensor) -> Distance:
    """Sums up the errors of some tokens [t]."""
    return Distance(worst=float(errors.max()), median=float(errors.median()))


def allowance(floor: Distance, dtype: torch.dtype) -> Distance:
    """Returns how far a step may be from its reference, given the measured floor."""
    least = LEAST_ALLOWED[dtype]
    return Distance(
        worst=min(max(FLOOR_FACTOR * floor.worst, least), MOST_ALLOWED),
        median=min(max(FLOOR_FACTOR * floor.median, least), MOST_ALLOWED),
    )


def block_sums(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Returns a checksum of the bits of these blocks in every layer [layers, len(blocks)] i64.

    Args:
        cache: [layers, blocks, 2, S, G, C]
        blocks: Block numbers.
    """
    bits = torch.int16 if cache.dtype.itemsize == 2 else torch.int32
    size = cache[0, 0].numel()
    weights = torch.arange(1, 2 * size, 2, device=cache.device)  # odd: moved values show
    sums = [
        (layer.index_select(0, blocks).flatten(1).view(bits).to(torch.int64) * weights).sum(1)
        for layer in cache
    ]
    return torch.stack(sums)
