"""Which measured effect is large enough to explain a launch that the model missed. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from cgprof.record.cost import ReplayCost
from cgprof.record.graph import GraphRecord, LaunchStats
from cgprof.record.types import RankRecord
from cgprof.record.worth import Estimate
from cgprof.units import format_ns

MOST_ERROR = 0.3  # of a predicted launch, relative to the measured one

_LEAST_SHARE = 0.5  # of what is missing, for an effect to count as its cause
_Z_95 = 1.96  # standard deviations on each side of a 95 % interval
# Source: asymptotic error of a median, sqrt(pi / 2) sigma / sqrt(n), with sigma = IQR / 1.349.
_MEDIAN_ERROR_PER_IQR = 1.2533 / 1.349


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The largest effect that could make up what is missing, and its numbers in words."""

    name: Literal["the wait", "cold caches", "unexplained"]
    words: str


def share_of_miss(cost: ReplayCost) -> float | None:
    """Returns how far a prediction is off what was timed beside it, relative to that."""
    if cost.predicted is None or cost.beside is None or not cost.beside.quiet_ns:
        return None
    return cost.predicted.value / cost.beside.quiet_ns - 1


def is_inside(cost: ReplayCost) -> bool:
    """Whether the prediction's interval holds what was timed beside it."""
    if cost.predicted is None or cost.beside is None:
        return False
    return cost.predicted.low <= cost.beside.quiet_ns <= cost.predicted.high


def cause_of_miss(rank: RankRecord, label: str) -> Cause | None:
    """Returns why a warm launch is not what was predicted, as far as other series can tell.

    An effect counts where it makes launches dearer, as the miss is, where its interval excludes
    zero and where it is at least half as large. None for a near prediction, and for runs whose host
    did not do the same before its own and the synthetic graphs.
    """
    cost, model = rank.replay_costs.get(label), rank.launch_model
    if cost is None or model is None or model.worked_ns is None:
        return None
    share = share_of_miss(cost)
    if share is None or abs(share) <= MOST_ERROR or cost.beside is None or cost.predicted is None:
        return None
    missing_ns = cost.beside.quiet_ns - cost.predicted.value
    if missing_ns < 0:
        less = f"{format_ns(-missing_ns)} less than predicted, which no measured effect can make"
        return Cause(name="unexplained", words=f"unexplained: {less}")
    graph = next((graph for graph in rank.graphs if graph.label == label), None)
    effects = {"the wait": cost.wait_adds, "cold caches": cold_caches(graph)}
    large = {
        name: effect.value
        for name, effect in effects.items()
        if effect is not None and effect.low > 0 and effect.value >= _LEAST_SHARE * missing_ns
    }
    missing = f"{format_ns(missing_ns)} more than predicted"
    if not large:
        listed = ", ".join(f"{name} {_measured(effect)}" for name, effect in effects.items())
        return Cause(name="unexplained", words=f"unexplained: {missing}; measured apart: {listed}")
    if max(large, key=lambda name: large[name]) == "the wait":
        waited = format_ns(cost.waited_ns)
        worked = format_ns(model.worked_ns)
        words = (
            f"the wait: {missing}; at once after {waited} of waiting a launch takes "
            f"{_measured(effects['the wait'])} more, and {worked} of work may leave a part of that"
        )
        return Cause(name="the wait", words=words)
    words = (
        f"cold caches: {missing}; with all keys in turn a launch takes "
        f"{_measured(effects['cold caches'])} more than with one again and again"
    )
    return Cause(name="cold caches", words=words)


def cold_caches(graph: GraphRecord | None) -> Estimate | None:
    """Returns what a launch costs more with all keys in turn than hot, in ns; medians of steps."""
    if graph is None or graph.replay is None or graph.round_robin is None:
        return None
    hot, turns = graph.replay.launch, graph.round_robin.launch
    value = float(turns.median_ns - hot.median_ns)
    half = _Z_95 * math.hypot(_error(hot), _error(turns))
    return Estimate(value=value, low=value - half, high=value + half)


def _error(stats: LaunchStats) -> float:
    return _MEDIAN_ERROR_PER_IQR * stats.iqr_ns / math.sqrt(max(stats.count, 1))


def _measured(effect: Estimate | None) -> str:
    if effect is None:
        return "not measured"
    return f"{format_ns(effect.value)} ({format_ns(effect.low)} to {format_ns(effect.high)})"
