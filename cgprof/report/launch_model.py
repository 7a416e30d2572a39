"""The launch model of a rank, and how well it foretells the replays that were measured."""

from __future__ import annotations

from collections.abc import Iterator

from cgprof.record.cost import LaunchModel, LaunchTerm, ReplayCost
from cgprof.record.types import RankRecord
from cgprof.record.worth import Estimate
from cgprof.report.checks_of_launch import MOST_ERROR
from cgprof.report.layout import Cell, Table, one_line, ratio
from cgprof.units import format_ns

_MODEL_COLUMNS = {
    "term": "term",
    "of": "cost of",
    "cost_ns": "estimate",
    "low_ns": "low",
    "high_ns": "high",
    "points": "graphs used",
}
_FIT_COLUMNS = {
    "key": "key",
    "measured_ns": "measured",
    "measured_iqr_ns": "IQR",
    "predicted_ns": "predicted",
    "low_ns": "low",
    "high_ns": "high",
    "predicted_over_measured_ratio": "predicted/measured",
    "within": f"within {MOST_ERROR:.0%}",
    "in_interval": "in the interval",
    "dominated_by": "predicted mostly",
    "samples": "n",
}


def launch_model_table(rank: RankRecord) -> Table:
    """Returns one row a term of the rank's launch model; no rows where there is none."""
    model = rank.launch_model
    return Table(
        name="launch-model",
        title="what launching a graph costs, by kinds of node",
        columns=_MODEL_COLUMNS,
        rows=() if model is None else tuple(_terms(model)),
        notes=() if model is None else (*_fitted(model), *map(one_line, model.notes)),
    )


def launch_fit_table(rank: RankRecord) -> Table:
    """Returns one row a key with a prediction, beside the measured replay call."""
    rows = [
        (label, *cells)
        for label, cost in rank.replay_costs.items()
        if (cells := _fit(cost)) is not None
    ]
    return Table(
        name="launch-fit",
        title="replays against the launch model",
        columns=_FIT_COLUMNS,
        rows=tuple(rows),
        notes=tuple(_judged(rank)),
    )


def is_within(cost: ReplayCost) -> bool | None:
    """Whether the prediction lies near the median that was timed beside it; None without one."""
    found = ratio(
        cost.predicted.value if cost.predicted else None,
        cost.beside.median_ns if cost.beside else None,
    )
    return None if found is None else abs(found - 1) <= MOST_ERROR


def _terms(model: LaunchModel) -> Iterator[tuple[Cell, ...]]:
    yield ("base", "a launch", *_cells(model.base_ns), len(model.points))
    for term in model.terms:
        yield from _of_term(term)
    for waited in model.waited:
        after = f"waited {format_ns(waited.waited_ns)}"
        yield (after, "a launch", *_cells(waited.ns), waited.points)
        yield (after, "a node", *_cells(waited.ns_per_node), waited.points)


def _of_term(term: LaunchTerm) -> Iterator[tuple[Cell, ...]]:
    if not term.curve:
        yield (term.kind, "a node", *_cells(term.ns_per_node), term.points)
        return
    for point in term.curve:
        yield (term.kind, f"{point.nodes} together", *_cells(point.ns), term.points)
    beyond = f"a node beyond {term.curve[-1].nodes}"
    yield (term.kind, beyond, *_cells(term.ns_per_node), term.points)


def _cells(estimate: Estimate) -> tuple[float, float, float]:
    return (estimate.value, estimate.low, estimate.high)


def _fitted(model: LaunchModel) -> Iterator[str]:
    yield (
        f"estimates, fitted to {len(model.points)} synthetic graphs of this run; 95 % intervals by "
        "a bootstrap over the points' residuals, each median's sampling error added"
    )
    yield (
        "fork: a node that several wait for, with their join; event-record: each beside a kernel, "
        "as NCCL adds them; waited: added by the host waiting for the device, interpolated between"
    )
    if model.scatter is not None and model.largest_error is not None:
        yield (
            f"points around the fit: {model.scatter:.0%} (one standard deviation), at most "
            f"{model.largest_error:.0%}"
        )


def _fit(cost: ReplayCost) -> tuple[Cell, ...] | None:
    if cost.predicted is None or cost.beside is None:
        return None
    within = is_within(cost)
    return (
        cost.beside.median_ns,
        cost.beside.iqr_ns,
        *_cells(cost.predicted),
        ratio(cost.predicted.value, cost.beside.median_ns),
        None if within is None else ("yes" if within else "no"),
        "yes" if cost.predicted.low <= cost.beside.median_ns <= cost.predicted.high else "no",
        cost.dominated_by.partition(":")[0] or None,
        cost.beside.count,
    )


def _judged(rank: RankRecord) -> Iterator[str]:
    verdicts = {label: is_within(cost) for label, cost in rank.replay_costs.items()}
    known = [verdict for verdict in verdicts.values() if verdict is not None]
    if not known:
        return
    yield (
        "measured: median host time of the replay call alone, device idle, taking turns with the "
        "synthetic graphs; predicted: an estimate by the launch model for its nodes, its forks and "
        "the wait for the replay before"
    )
    yield f"within {MOST_ERROR:.0%} of the measured median: {sum(known)} of {len(known)} keys"
    outside = [label for label, verdict in verdicts.items() if verdict is False]
    if outside:
        yield (
            f"outside: {', '.join(outside)}; where the interval holds the time, the host's pace "
            "alone may be the difference, else the model lacks a term"
        )
