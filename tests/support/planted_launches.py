"""Launch times of synthetic graphs as a planted truth has them."""

from collections.abc import Mapping, Sequence

import numpy as np

from cgprof.cost.synthetic_layout import Spec, specs
from cgprof.record.cost import LaunchPoint

BASE_NS = 5_000.0
SLOPES = {
    "kernel": 1.5,
    "memset": 6.0,
    "memcpy": 8.0,
    "peer-copy": 1_100.0,
    "event-wait": 400.0,
    "fork": 20.0,
}
RECORDS = {0: 0.0, 1: 2e3, 10: 25e3, 50: 200e3, 100: 900e3, 200: 4_200e3, 400: 17e6}
WAITS = {0: (0.0, 0.0), 1_000_000: (4e3, 1.0), 5_000_000: (9e3, 4.0), 20_000_000: (12e3, 6.0)}


def truth_ns(counts: Mapping[str, int], waited_ns: int) -> float:
    nodes = sum(count for kind, count in counts.items() if kind != "fork")
    once, each = (
        float(np.interp(waited_ns, list(WAITS), [cost[index] for cost in WAITS.values()]))
        for index in (0, 1)
    )
    records = float(np.interp(counts.get("event-record", 0), list(RECORDS), list(RECORDS.values())))
    linear = sum(SLOPES[kind] * count for kind, count in counts.items() if kind in SLOPES)
    return BASE_NS + linear + records + once + each * nodes


def planted_points(
    noise: float = 0.0, seed: int = 0, graphs: Sequence[Spec] | None = None
) -> tuple[LaunchPoint, ...]:
    """A point for each spec; the host waits for the graph itself too, 2 us a node."""
    rng = np.random.default_rng(seed)
    points = []
    for spec in specs(with_peer=True) if graphs is None else graphs:
        nodes = sum(count for kind, count in spec.counts.items() if kind != "fork")
        waited_ns = spec.busy_ns + 2_000 * nodes
        exact = truth_ns(spec.counts, waited_ns)
        met = exact * (1 + noise * rng.standard_normal())
        points.append(
            LaunchPoint(
                kind=spec.kind,
                counts=dict(spec.counts),
                median_ns=round(max(met, 1.0)),
                iqr_ns=round(exact * noise),
                count=60,
                waited_ns=waited_ns,
            )
        )
    return tuple(points)
