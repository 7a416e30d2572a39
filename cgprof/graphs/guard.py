"""Whether a recorded graph holds the work, and whether its inputs are still where it reads them.

Pure: counts and addresses in, an error or nothing out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cgprof.errors import CaptureError, ReplayError
from cgprof.shapes import GraphKey

# The smaller over the larger of the counts of two keys of one kind. Between sizes the kernels vary:
# 818, 866 or 914 nodes where attention adds a merge to each of 48 layers, or matmuls a reduction.
MIN_COUNT_RATIO = 0.75
# A twin may lack or exceed what its microbatches should hold by this many of them: a lost one is 1.
MICROBATCH_SLACK = 0.5
# What the two kinds of doubt have in common, wherever they are quoted.
EMPTY = "invalid: empty"
LOST = "lost or recorded twice"


def check_nodes(
    key: GraphKey, nodes: Mapping[str, int], captured: Mapping[GraphKey, Mapping[str, int]]
) -> None:
    """Checks that a graph holds about the work that those captured before lead one to expect.

    Raises:
        CaptureError: There is a doubt, see `doubt_of_nodes`.
    """
    doubt = doubt_of_nodes(key, nodes, captured)
    if doubt is not None:
        raise CaptureError(str(key), doubt)


def doubt_of_nodes(
    key: GraphKey, nodes: Mapping[str, int], captured: Mapping[GraphKey, Mapping[str, int]]
) -> str | None:
    """Returns why a graph cannot hold all of its work, or None.

    No kernel, or a count far from the neighbouring key of its kind or, for a twin, from the
    microbatches' plain keys times their number: a microbatch runs the kernels of a plain key of
    its own size. A share of the whole count would be no bound: of many microbatches one is less
    than the kernels vary with the size.
    """
    count = nodes.get("kernel", 0)
    if not count:
        found = ", ".join(f"{number} {kind}" for kind, number in sorted(nodes.items()))
        return (
            f"{EMPTY}, no kernel in the graph ({found or 'no node at all'}); the work ran "
            "on a stream or thread that does not belong to the recording"
        )
    kernels = {other: kinds.get("kernel", 0) for other, kinds in captured.items()}
    of_microbatch = _around_microbatch(key, kernels) if key.is_twin else {}
    least = MIN_COUNT_RATIO
    if key.is_twin and not of_microbatch:
        least = max(least, 1 - MICROBATCH_SLACK / key.num_microbatches)
    doubt = _doubt_of_twin(key, count, of_microbatch) if of_microbatch else None
    return doubt or _doubt_beside_neighbour(key, count, kernels, least)


def check_addresses(
    key: GraphKey, now: Sequence[int], at_capture: Sequence[int], names: Sequence[str]
) -> None:
    """Checks that everything that the graph reads or writes is where it was at capture.

    Raises:
        ReplayError: Something moved; the message names it.
    """
    moved = [
        f"{name} moved from {old:#x} to {new:#x}"
        for name, new, old in zip(names, now, at_capture, strict=True)
        if new != old
    ]
    if moved:
        raise ReplayError(
            str(key), f"{', '.join(moved)}; the graph still uses the old address: capture it again"
        )


def _around_microbatch(key: GraphKey, kernels: Mapping[GraphKey, int]) -> dict[GraphKey, int]:
    """The plain keys just below and just above the size of one microbatch, or of that size."""
    size = key.num_tokens // key.num_microbatches
    plain = [k for k in kernels if k.mode is key.mode and not k.is_twin]
    below = max((k for k in plain if k.num_tokens <= size), key=_size, default=None)
    above = min((k for k in plain if k.num_tokens >= size), key=_size, default=None)
    return {k: kernels[k] for k in (below, above) if k is not None}


def _doubt_of_twin(key: GraphKey, count: int, of_microbatch: Mapping[GraphKey, int]) -> str | None:
    number = key.num_microbatches
    low = (number - MICROBATCH_SLACK) * min(of_microbatch.values())
    high = (number + MICROBATCH_SLACK) * max(of_microbatch.values())
    if low <= count <= high:
        return None
    known = " and ".join(
        f"{number} x {kernels} of {plain} are {number * kernels}"
        for plain, kernels in of_microbatch.items()
    )
    return (
        f"the graph has {count} kernels where {known}; below {low:.0f} or above {high:.0f}, "
        f"half a microbatch away, one was {LOST}"
    )


def _doubt_beside_neighbour(
    key: GraphKey, count: int, kernels: Mapping[GraphKey, int], least: float
) -> str | None:
    alike = [
        k
        for k in kernels
        if k.mode is key.mode and k.num_microbatches == key.num_microbatches and k != key
    ]

    def distance(other: GraphKey) -> tuple[int, bool]:
        away = abs(other.num_tokens - key.num_tokens)
        return (away, other.uniform_query_len != key.uniform_query_len)

    neighbour = min(alike, key=distance, default=None)
    if neighbour is None:
        return None
    expected = kernels[neighbour]
    if min(count, expected) >= least * max(count, expected):
        return None
    return (
        f"the graph has {count} kernels where {neighbour} has {expected} (ratio "
        f"{count / expected:.2f}); kernels vary with the size by a tenth, so below {least:.2f} "
        f"or above {1 / least:.2f} some of the work was {LOST}"
    )


def _size(key: GraphKey) -> int:
    return key.num_tokens
