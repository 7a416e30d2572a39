"""Which rank owns which experts."""

from __future__ import annotations

from cgprof.errors import ConfigError


def expert_range(num_experts: int, size: int, rank: int) -> range:
    """Returns the experts of one rank: contiguous, in rank order, at most one more than another's.

    Raises:
        ConfigError: There are more ranks than experts.
    """
    if size > num_experts:
        raise ConfigError(
            "parallel.data_parallel_size (--data-parallel-size)",
            f"{size} ranks cannot share {num_experts} experts, each needs one; "
            f"use at most {num_experts} ranks",
        )
    return range(num_experts * rank // size, num_experts * (rank + 1) // size)


def expert_starts(num_experts: int, size: int) -> list[int]:
    """Returns [P + 1]: rank p has experts starts[p] .. starts[p + 1] - 1.

    Raises:
        ConfigError: There are more ranks than experts.
    """
    return [*(expert_range(num_experts, size, rank).start for rank in range(size)), num_experts]
