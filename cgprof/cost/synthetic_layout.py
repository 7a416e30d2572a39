"""Which synthetic graphs the launch model is fitted to, and the order of their nodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cgprof.cost.launch_model import WAITED_KNOTS_NS
from cgprof.record.cost import NodeKind

KERNEL_SIZES = (10, 100, 1000, 4000)
OTHER_SIZES = (10, 100, 1000)
EVENT_SIZES = (1, 10, 50, 100, 200, 400)
WAITED_SIZES = (10, 600, 1200)

_FEW_KERNELS = 4
_KERNELS_A_FORK = 5
_BRANCHES: tuple[NodeKind, ...] = ("fork", "event-record")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A graph to build: what is in it, which kind its series varies, how long the host waits.

    Every event-record node is one of the forks: it stands beside a kernel.
    """

    kind: NodeKind
    counts: Mapping[NodeKind, int]
    busy_ns: int = 0  # the device works so long before each launch, and the host waits for it

    @property
    def in_graph(self) -> dict[NodeKind, int]:
        """The counts as a graph has them; a fork there is a node with more than one successor.

        The second branch hangs on the side stream's first one as well as on the main stream, so
        that each branch but the last makes two nodes with more than one successor.
        """
        return {**self.counts, "fork": max(0, 2 * self.counts.get("fork", 0) - 1)}


def specs(*, with_peer: bool) -> tuple[Spec, ...]:
    """Returns all graphs; those of the event curve rise, so that it can be cut short."""
    straight = [Spec(kind="kernel", counts={"kernel": size}) for size in KERNEL_SIZES]
    forked = [
        Spec(kind="fork", counts={"kernel": size, "fork": (size - 1) // _KERNELS_A_FORK})
        for size in KERNEL_SIZES
    ]
    others: tuple[NodeKind, ...] = ("memset", "memcpy", "event-wait")
    mixed = [
        Spec(kind=kind, counts={"kernel": _FEW_KERNELS, kind: size})
        for kind in (*others, *(("peer-copy",) if with_peer else ()))
        for size in OTHER_SIZES
    ]
    events = [
        Spec(
            kind="event-record", counts={"kernel": 2 * size + 1, "event-record": size, "fork": size}
        )
        for size in EVENT_SIZES
    ]
    waited = [
        Spec(kind="kernel", counts={"kernel": size}, busy_ns=busy_ns)
        for size in WAITED_SIZES
        for busy_ns in (0, *WAITED_KNOTS_NS)
        if busy_ns or size not in KERNEL_SIZES
    ]
    return (*straight, *waited, *forked, *mixed, *events)


def node_order(counts: Mapping[NodeKind, int]) -> tuple[NodeKind, ...]:
    """Returns the nodes in order, kinds mixed evenly, a kernel first; what branches stands alone.

    A 'fork' is a kernel on each of two streams, an 'event-record' a kernel beside the record;
    both are joined at once, with at least one other node before, between and after them.

    Raises:
        ValueError: Too few other nodes to stand between the forks.
    """
    records = counts.get("event-record", 0)
    forks = counts.get("fork", 0) - records
    kernels = counts.get("kernel", 0) - 2 * forks - records
    others = {kind: n for kind, n in counts.items() if kind not in ("kernel", *_BRANCHES)}
    num_straight = kernels + sum(others.values())
    num_branches = forks + records
    if forks < 0 or kernels < 1 or num_straight <= num_branches:
        raise ValueError(f"{dict(counts)} leaves no nodes to stand between {num_branches} forks")
    straight = ["kernel", *_mixed({"kernel": kernels - 1, **others})]
    branches = _mixed({"fork": forks, "event-record": records})
    order: list[NodeKind] = []
    start = 0
    for index, branch in enumerate(branches, start=1):
        end = index * num_straight // (num_branches + 1)
        order += [*straight[start:end], branch]
        start = end
    return (*order, *straight[start:])


def _mixed(counts: Mapping[NodeKind, int]) -> list[NodeKind]:
    """Every kind spread evenly over the whole."""
    places = [((index + 0.5) / n, kind) for kind, n in counts.items() for index in range(n)]
    return [kind for _, kind in sorted(places)]
