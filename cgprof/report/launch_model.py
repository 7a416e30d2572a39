"""The launch model of a rank, and how well it foretells the replays that were measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cgprof.record.cost import LaunchModel, LaunchTerm, ReplayCost
from cgprof.record.graph import GraphRecord
from cgprof.record.types import RankRecord
from cgprof.record.worth import Estimate
from cgprof.report.launch_causes import MOST_ERROR, cause_of_miss, is_inside, share_of_miss
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
    "measured_median_ns": "median",
    "measured_iqr_ns": "IQR",
    "predicted_ns": "predicted",
    "low_ns": "low",
    "high_ns": "high",
    "predicted_over_measured_ratio": "predicted/measured",
    "within": f"within {MOST_ERROR:.0%}",
    "in_interval": "in the interval",
    "cause": "missing",
    "waited_ns": "wait",
    "wait_adds_ns": "wait adds",
    "wait_adds_low_ns": "low",
    "wait_adds_high_ns": "high",
    "predicted_wait_ns": "by the model",
    "slow_adds_ns": "slow host adds",
    "slow_adds_low_ns": "low",
    "slow_adds_high_ns": "high",
    "with_wait_ns": "predicted + wait",
    "loop_ns": "p50 in steps",
    "with_wait_over_loop_ratio": "predicted + wait/steps",
    "predicted_over_loop_ratio": "predicted/steps",
    "dominated_by": "predicted mostly",
    "samples": "n",
}
_OPTIONAL = frozenset(
    name
    for name in _FIT_COLUMNS
    if any(part in name for part in ("wait", "loop", "slow")) or name == "cause"
)
_NONE_BESIDE = (
    "none of the run's own graphs took turns with the synthetic ones, so that no prediction is "
    "judged; among several ranks none can, since they must replay equally often: run on one device "
    "to compare"
)


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
    graphs = {graph.label: graph for graph in rank.graphs}
    rows = [
        (label, *cells)
        for label, cost in rank.replay_costs.items()
        if (cells := _fit(rank, cost, graphs.get(label), label)) is not None
    ]
    return Table(
        name="launch-fit",
        title="replays against the launch model",
        columns=_FIT_COLUMNS,
        rows=tuple(rows),
        notes=tuple(_judged(rank)),
        optional=_OPTIONAL,
    )


def is_within(cost: ReplayCost) -> bool | None:
    """Whether the prediction lies near what was timed beside it; None without that."""
    share = share_of_miss(cost)
    return None if share is None else abs(share) <= MOST_ERROR


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
    statistic = _statistic(point.p25_ns for point in model.points)
    yield (
        f"estimates, fitted to {len(model.points)} synthetic graphs of this run; 95 % intervals by "
        f"a bootstrap over the points' residuals, each {statistic}'s sampling error added"
    )
    yield (
        "fork: a node that several wait for, with their join; event-record: each beside a kernel, "
        "as NCCL adds them; waited: added by the host waiting for the device, interpolated between"
    )
    if model.worked_ns is not None:
        yield (
            f"before each launch the host works for {format_ns(model.worked_ns)}, the device idle, "
            "as steps are prepared; waited: it only waited so long, and launched at once"
        )
    if model.full_pace_share is not None:
        yield (
            f"{model.full_pace_share:.0%} of the launches were at the host's full pace, by a fixed "
            "loop of Python right after each; the others are left out"
        )
    if model.scatter is not None and model.largest_error is not None:
        yield _around("points", model.scatter, model.largest_error)
    if model.warm_scatter is not None and model.warm_largest_error is not None:
        yield _around("points without a wait", model.warm_scatter, model.warm_largest_error)


def _around(points: str, scatter: float, largest_error: float) -> str:
    return (
        f"{points} around the fit: {scatter:.0%} (one standard deviation), at most "
        f"{largest_error:.0%}"
    )


def _fit(
    rank: RankRecord, cost: ReplayCost, graph: GraphRecord | None, label: str
) -> tuple[Cell, ...] | None:
    if cost.predicted is None or cost.beside is None:
        return None
    within, cause = is_within(cost), cause_of_miss(rank, label)
    return (
        cost.beside.quiet_ns,
        cost.beside.median_ns,
        cost.beside.iqr_ns,
        *_cells(cost.predicted),
        ratio(cost.predicted.value, cost.beside.quiet_ns),
        None if within is None else ("yes" if within else "no"),
        "yes" if is_inside(cost) else "no",
        cause.name if cause else None,
        *_of_wait(cost, graph),
        cost.dominated_by.partition(":")[0] or None,
        cost.beside.count,
    )


def _of_wait(cost: ReplayCost, graph: GraphRecord | None) -> tuple[Cell, ...]:
    """What the wait adds, and the prediction with and without it beside the steps' median."""
    if cost.wait_adds is None or cost.predicted is None:
        return (None,) * 12
    with_wait_ns = cost.predicted.value + cost.wait_adds.value
    loop_ns = graph.replay.launch.median_ns if graph and graph.replay else None
    return (
        cost.waited_ns,
        *_cells(cost.wait_adds),
        cost.predicted_wait.value if cost.predicted_wait else None,
        *((None,) * 3 if cost.slow_adds is None else _cells(cost.slow_adds)),
        with_wait_ns,
        loop_ns,
        ratio(with_wait_ns, loop_ns),
        ratio(cost.predicted.value, loop_ns),
    )


def _judged(rank: RankRecord) -> Iterator[str]:
    verdicts = {label: is_within(cost) for label, cost in rank.replay_costs.items()}
    known = [verdict for verdict in verdicts.values() if verdict is not None]
    if not known:
        if rank.launch_model is not None and rank.launch_model.worked_ns is not None:
            yield _NONE_BESIDE
        return
    yield from _how_measured(rank)
    yield f"within {MOST_ERROR:.0%} of what was measured: {sum(known)} of {len(known)} keys"
    outside = [label for label, verdict in verdicts.items() if verdict is False]
    causes = {label: cause for label in outside if (cause := cause_of_miss(rank, label))}
    unnamed = [label for label in outside if label not in causes]
    yield from (f"outside: {label}, {cause.words}" for label, cause in causes.items())
    if unnamed:
        yield (
            f"outside: {', '.join(unnamed)}; where the interval holds the time, the host's pace "
            "alone may be the difference, else the model lacks a term"
        )
    yield from _against_steps(rank)


def _how_measured(rank: RankRecord) -> Iterator[str]:
    model = rank.launch_model
    if model is None or model.worked_ns is None:
        yield (
            "measured: median host time of the replay call alone, device idle, taking turns with "
            "the synthetic graphs; predicted: an estimate by the launch model for its nodes, its "
            "forks and the wait for the replay before"
        )
        return
    beside = (cost.beside for cost in rank.replay_costs.values())
    statistic = _statistic(one.p25_ns for one in beside if one is not None)
    yield (
        f"measured: {statistic} of the host times of the replay call alone, device idle, "
        "taking turns with the synthetic graphs, which the model is fitted to by the same; before "
        f"each of either the host works for {format_ns(model.worked_ns)}; "
        "predicted: an estimate by the launch model for its nodes and forks"
    )
    yield (
        "wait adds: the same call at once after the replay before it, less one of a host that "
        "worked, in pairs within the same seconds (median, 95 %); by the model: what such a wait "
        "adds to synthetic graphs; missing: the largest measured effect that could make up the "
        "difference"
    )
    if any(cost.slow_adds for cost in rank.replay_costs.values()):
        yield (
            "slow host adds: the same launches while a fixed loop of Python took longer than at "
            "the host's full pace, less the median of those at full pace"
        )


def _statistic(quartiles: Iterable[int | None]) -> str:
    """Neighbours only add time, so a launch is judged by its quartile; older runs have none."""
    return "median" if None in quartiles else "lower quartile"


def _against_steps(rank: RankRecord) -> Iterator[str]:
    """Steps wait for the device, then prepare: they lie between a warm host and one that waited."""
    ratios = [
        (ratio(cost.predicted.value, loop_ns), ratio(cost.predicted.value + adds.value, loop_ns))
        for graph in rank.graphs
        if (cost := rank.replay_costs.get(graph.label)) is not None
        and cost.predicted is not None
        and (adds := cost.wait_adds) is not None
        and graph.replay is not None
        and (loop_ns := graph.replay.launch.median_ns)
    ]
    if ratios:
        warm, waiting = (
            sum(one is not None and abs(one - 1) <= MOST_ERROR for one in ones)
            for ones in zip(*ratios, strict=True)
        )
        yield (
            "p50 in steps (hot), a median whatever the prediction is fitted to: there the host "
            "waits for the step before, then prepares, and launches; within "
            f"{MOST_ERROR:.0%} of it: predicted {warm} of {len(ratios)} keys, "
            f"predicted + wait {waiting}"
        )
