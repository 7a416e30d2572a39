"""Which few of the keys stand for all, where measuring each would take too long. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from cgprof.shapes import GraphKey


def choose_keys(plan_keys: Iterable[GraphKey], count: int) -> tuple[GraphKey, ...]:
    """Returns at most `count` keys: the ends first, then those in the widest gaps.

    The ends are the largest plain key, the smallest, the largest twin, the smallest. Each further
    key is the one that is farthest, in tokens, from the chosen ones of its kind; of equals the
    larger one and the plain one. The order is that in which they should be measured.
    """
    keys = list(dict.fromkeys(plan_keys))
    plain = sorted((key for key in keys if not key.is_twin), key=_size)
    twins = sorted((key for key in keys if key.is_twin), key=_size)
    ends = [kind[index] for kind in (plain, twins) if kind for index in (-1, 0)]
    chosen = list(dict.fromkeys(ends))[:count]
    while len(chosen) < min(count, len(keys)):
        left = [key for key in keys if key not in chosen]
        chosen.append(max(left, key=lambda key: (_gap(key, chosen), *_size(key), not key.is_twin)))
    return tuple(chosen)


def _gap(key: GraphKey, chosen: Iterable[GraphKey]) -> int:
    return min(
        abs(key.num_tokens - other.num_tokens) for other in chosen if other.is_twin is key.is_twin
    )


def _size(key: GraphKey) -> tuple[int, int]:
    return key.num_tokens, key.num_reqs or 0
