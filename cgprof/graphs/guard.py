"""Whether a recorded graph holds the work, and whether its inputs are still where it reads them.

Pure: counts and addresses in, an error or nothing out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cgprof.errors import CaptureError, ReplayError
from cgprof.shapes import GraphKey

# The smaller over the larger of two counts. Between sizes, libraries choose other kernels and add
# or drop a split-K reduction: 2550 against 2598 nodes, 2 %. A lost microbatch is 50 %.
MIN_COUNT_RATIO = 0.75


def check_nodes(
    key: GraphKey, nodes: Mapping[str, int], captured: Mapping[GraphKey, Mapping[str, int]]
) -> None:
    """Checks that a graph holds about the work that those captured before lead one to expect.

    Raises:
        CaptureError: No kernel, or a count far from the neighbouring key of its kind or, for a
            twin, from the plain key's times the number of microbatches.
    """
    count = nodes.get("kernel", 0)
    if not count:
        found = ", ".join(f"{number} {kind}" for kind, number in sorted(nodes.items()))
        raise CaptureError(
            str(key),
            f"the graph is empty: no kernel in it ({found or 'no node at all'}); the work ran on "
            "a stream or thread that does not belong to the recording",
        )
    neighbour = _nearest(key, captured, key.num_microbatches)
    if neighbour is not None:
        expected = captured[neighbour].get("kernel", 0)
        _check_count(key, count, expected, f"{neighbour} has {expected}")
    plain = _nearest(key, captured, 1) if key.is_twin else None
    if plain is not None:
        of_plain = captured[plain].get("kernel", 0)
        expected = key.num_microbatches * of_plain
        _check_count(
            key, count, expected, f"{key.num_microbatches} x {of_plain} of {plain} are {expected}"
        )


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


def _nearest(
    key: GraphKey, captured: Mapping[GraphKey, Mapping[str, int]], num_microbatches: int
) -> GraphKey | None:
    alike = [
        other
        for other in captured
        if other.mode is key.mode and other.num_microbatches == num_microbatches and other != key
    ]

    def distance(other: GraphKey) -> tuple[int, bool]:
        away = abs(other.num_tokens - key.num_tokens)
        return (away, other.uniform_query_len != key.uniform_query_len)

    return min(alike, key=distance, default=None)


def _check_count(key: GraphKey, count: int, expected: int, source: str) -> None:
    ratio = min(count, expected) / max(count, expected)
    if ratio < MIN_COUNT_RATIO:
        raise CaptureError(
            str(key),
            f"the graph has {count} kernels where {source} (ratio {count / expected:.2f}); sizes "
            f"differ by a few per cent through kernel selection, so below {MIN_COUNT_RATIO} or "
            f"above {1 / MIN_COUNT_RATIO:.2f} some of the work was lost or recorded twice",
        )
