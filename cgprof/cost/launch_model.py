"""What a launch costs by kinds of node: fitted to synthetic graphs, predicted for others. Pure.

All terms are linear in what they multiply and never negative, so that one non-negative least
squares finds them together. Errors count relative to a point's time, or large graphs rule. Fitted
are lower quartiles: on a shared host neighbours add time to some launches and take none. Launches
after a wait scatter far more than those of a host that worked, so that residuals stay apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from cgprof.errors import DeviceError
from cgprof.record.cost import (
    CurvePoint,
    LaunchModel,
    LaunchPoint,
    LaunchTerm,
    NodeKind,
    WaitedTerm,
)
from cgprof.record.worth import Estimate

# Waits of the host before a launch, from none to a long step; longer ones count as the longest.
WAITED_KNOTS_NS = (1_000_000, 5_000_000, 20_000_000)
LINEAR_KINDS: tuple[NodeKind, ...] = (
    "kernel",
    "memset",
    "memcpy",
    "peer-copy",
    "event-wait",
    "fork",
)
CURVE_KIND: NodeKind = "event-record"

_NUM_RESAMPLES = 400
_TAILS_PERCENT = (2.5, 97.5)
_LEAST_RESPONSE = 0.01  # of a fitted time; a resample stays positive
_ITERATIONS_PER_COLUMN = 30
# Source: asymptotic error of a normal's quartile, 1.3626 sigma / sqrt(n), with sigma = IQR / 1.349.
_QUARTILE_ERROR_PER_IQR = 1.3626 / 1.349
# A knot counts as reached a little before it: the wait of a spinning device is not exact.
_REACHED_SHARE = 0.8

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """What the columns of the design are, in their order after the base."""

    kinds: tuple[NodeKind, ...]
    curve: tuple[int, ...]  # node counts of the curve's knots
    waits: tuple[int, ...]  # knots of the wait, once for the launch and once for each node

    def design(self, points: Sequence[LaunchPoint]) -> _Floats:
        """Returns what each coefficient is multiplied by [points, columns]."""
        records = [point.counts.get(CURVE_KIND, 0) for point in points]
        waits = _ramps([point.waited_ns for point in points], self.waits)
        nodes = np.array([float(point.nodes) for point in points])[:, None]
        counts = [float(point.counts.get(kind, 0)) for point in points for kind in self.kinds]
        return np.concatenate(
            [
                np.ones((len(points), 1)),
                np.array(counts).reshape(len(points), len(self.kinds)),
                _ramps(records, self.curve),
                waits,
                waits * nodes,
            ],
            axis=1,
        )

    def values(self, coefficients: _Floats) -> _Floats:
        """Returns base, slopes, curve and waits from coefficients [..., columns].

        The coefficients of curve and waits are what each knot adds to the one before.
        """
        sizes = (1 + len(self.kinds), len(self.curve), len(self.waits), len(self.waits))
        parts = np.split(coefficients, np.cumsum(sizes)[:-1], axis=-1)
        return np.concatenate([parts[0], *(np.cumsum(part, axis=-1) for part in parts[1:])], -1)


def fit(points: Sequence[LaunchPoint], seed: int) -> LaunchModel:
    """Returns the model of these points.

    Intervals are 95 % percentile intervals of a bootstrap over the points' relative residuals, to
    which each quartile's own sampling error is added.

    Raises:
        DeviceError: There are not more points than terms, or a time is zero.

    Source: Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), chapter 9.
    """
    columns = _columns(points)
    design = columns.design(points)
    times = np.array([float(point.quiet_ns) for point in points])
    num_points, num_columns = design.shape
    warm = np.array([not point.waited_ns for point in points], bool)
    if num_points <= num_columns or not times.all():
        raise DeviceError(
            f"the launch model has {num_columns} terms and needs more synthetic graphs with a time "
            f"than that, found {np.count_nonzero(times)}: set measure.launch_model=false"
        )
    best = _solve(design, times, times)
    fitted = design @ best
    residuals = times / fitted - 1
    scatter, largest_error = _scatter(residuals, design)
    resampled = _resampled(points, design, times, fitted, seed)
    draws = np.stack([_solve(design, one, times) for one in resampled])
    values = _estimates(columns.values(best), columns.values(draws))
    facts = {"scatter": scatter, "largest_error": largest_error}
    if warm.any():
        facts["warm_scatter"], facts["warm_largest_error"] = _scatter(residuals[warm], design[warm])
    return _model(columns, points, values).model_copy(update=facts)


def _scatter(residuals: _Floats, design: _Floats) -> tuple[float | None, float]:
    """Their standard deviation, None where every point has a term of its own, and the largest."""
    spare = residuals.size - int(np.count_nonzero(design.any(axis=0)))
    scatter = float(np.sqrt((residuals**2).sum() / spare)) if spare > 0 else None
    return scatter, float(np.abs(residuals).max())


def _columns(points: Sequence[LaunchPoint]) -> _Columns:
    """Only terms that a point tells something about."""
    longest = max((point.waited_ns for point in points), default=0)
    records = {point.counts.get(CURVE_KIND, 0) for point in points}
    return _Columns(
        kinds=tuple(
            kind for kind in LINEAR_KINDS if any(point.counts.get(kind, 0) for point in points)
        ),
        curve=tuple(sorted(records - {0})),
        waits=tuple(knot for knot in WAITED_KNOTS_NS if longest >= _REACHED_SHARE * knot),
    )


def _ramps(values: Sequence[int], knots: Sequence[int]) -> _Floats:
    """For each value, how far it is from one knot to the next: 0 before, 1 beyond [n, knots]."""
    starts = np.array([0, *knots[:-1]], np.float64)[: len(knots)]
    widths = np.array(knots, np.float64) - starts
    shares: _Floats = np.clip((np.array(values, np.float64)[:, None] - starts) / widths, 0, 1)
    return shares


def _solve(design: _Floats, times: _Floats, weights: _Floats) -> _Floats:
    """Least squares of (time - fit) / weight over non-negative coefficients."""
    scaled = design / weights[:, None]
    norms = np.linalg.norm(scaled, axis=0)
    limit = _ITERATIONS_PER_COLUMN * design.shape[1]
    found, _ = nnls(scaled / norms, times / weights, maxiter=limit)
    coefficients: _Floats = np.asarray(found, np.float64) / norms
    return coefficients


def _resampled(
    points: Sequence[LaunchPoint], design: _Floats, times: _Floats, fitted: _Floats, seed: int
) -> _Floats:
    """Times that the fit could as well have met [resamples, points]."""
    num_points, num_columns = design.shape
    rng = np.random.default_rng(seed)
    residuals = (times / fitted - 1) * np.sqrt(num_points / (num_points - num_columns))
    warm = np.array([not point.waited_ns for point in points], bool)
    drawn = np.empty((_NUM_RESAMPLES, num_points))
    for alike in (warm, ~warm):
        if alike.any():
            drawn[:, alike] = rng.choice(residuals[alike], (_NUM_RESAMPLES, int(alike.sum())))
    errors = np.array(
        [_QUARTILE_ERROR_PER_IQR * point.iqr_ns / max(point.count, 1) ** 0.5 for point in points]
    )
    noise = rng.standard_normal(drawn.shape) * errors
    times_met: _Floats = np.maximum(fitted * (1 + drawn) + noise, _LEAST_RESPONSE * fitted)
    return times_met


def _estimates(best: _Floats, draws: _Floats) -> list[Estimate]:
    lows, highs = np.percentile(draws, _TAILS_PERCENT, axis=0)
    return [
        Estimate(value=float(value), low=min(float(low), value), high=max(float(high), value))
        for value, low, high in zip(best.tolist(), lows, highs, strict=True)
    ]


def _model(
    columns: _Columns, points: Sequence[LaunchPoint], values: Sequence[Estimate]
) -> LaunchModel:
    base, *rest = values
    slopes, rest = rest[: len(columns.kinds)], rest[len(columns.kinds) :]
    heights, rest = rest[: len(columns.curve)], rest[len(columns.curve) :]
    once, each = rest[: len(columns.waits)], rest[len(columns.waits) :]
    terms = [
        LaunchTerm(kind=kind, ns_per_node=slope, points=_holding(points, kind))
        for kind, slope in zip(columns.kinds, slopes, strict=True)
    ]
    curve = [
        CurvePoint(nodes=nodes, ns=height)
        for nodes, height in zip(columns.curve, heights, strict=True)
    ]
    if curve:
        terms.append(
            LaunchTerm(
                kind=CURVE_KIND,
                ns_per_node=_last_slope(curve),
                curve=tuple(curve),
                points=_holding(points, CURVE_KIND),
            )
        )
    waited = [
        WaitedTerm(
            waited_ns=knot,
            ns=one,
            ns_per_node=per_node,
            points=sum(point.waited_ns >= _REACHED_SHARE * knot for point in points),
        )
        for knot, one, per_node in zip(columns.waits, once, each, strict=True)
    ]
    return LaunchModel(base_ns=base, terms=tuple(terms), points=tuple(points), waited=tuple(waited))


def _holding(points: Sequence[LaunchPoint], kind: NodeKind) -> int:
    return sum(bool(point.counts.get(kind, 0)) for point in points)


def _last_slope(curve: Sequence[CurvePoint]) -> Estimate:
    """Bounds pair the lower end with the upper start, and never fall below zero."""
    zero = Estimate(value=0, low=0, high=0)
    start = curve[-2] if len(curve) > 1 else CurvePoint(nodes=0, ns=zero)
    end = curve[-1]
    width = end.nodes - start.nodes
    return Estimate(
        value=(end.ns.value - start.ns.value) / width,
        low=max(0.0, (end.ns.low - start.ns.high) / width),
        high=(end.ns.high - start.ns.low) / width,
    )
