"""Checks of launch times: what they are spent on. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cgprof.graphs.estimate import bytes_of_nodes
from cgprof.record.cost import MIXING_OFF, LaunchModel, NodeKind, ReplayCost
from cgprof.record.types import RankRecord, RunRecord
from cgprof.report import needs
from cgprof.report.finding import Check, Finding
from cgprof.report.launch_causes import MOST_ERROR, cause_of_miss, is_inside, share_of_miss
from cgprof.report.layout import Plain

EVENT_RECORD_NODES = "event-record-nodes"
PEER_COPIES = "peer-copies"
LAUNCH_UNEXPLAINED = "launch-unexplained"
TRACING_INFLATES = "tracing-inflates"
MODEL_LOOSE = "launch-model-loose"

MOST_INFLATION = 3.0  # of a launch under CUPTI, over one in a process that never had it

_EVENT_RECORD: NodeKind = "event-record"
_EVENTS = "a graph holds an event-record node"
_PEER = "a graph holds a copy between devices that the driver makes, about 1 us each"
_ERROR = (
    f"the launch model is more than {MOST_ERROR:.0%} off the measured launch, which lies outside "
    "of its 95 % interval"
)
_LOOSE = (
    f"points scatter around the launch model by more than {MOST_ERROR:.0%}, or it is more than "
    "that off a launch which lies inside of its interval"
)
_QUIET = (
    "the host changed its pace while synthetic graphs were timed: the launch model of this run is "
    "inconclusive; run again on a quiet host"
)
_SEE_CAUSES = "the model tells too little of these keys: --table launch-fit has the cause of each"
_INFLATED = f"a launch takes more than {MOST_INFLATION:g} times as long with CUPTI attached"
_NOT_MIXING = (
    "mixing is off, so they are not NCCL's for that: record external events (torch.cuda.Event("
    "external=True)) outside the graph"
)


def event_record_nodes(run: RunRecord) -> Iterator[Finding]:
    """Finds graphs whose launch pays for event-record nodes, as NCCL adds with graph mixing."""
    for rank in run.ranks:
        counts = {
            graph.label: count
            for graph in rank.graphs
            if (count := graph.nodes.get(_EVENT_RECORD, 0))
        }
        if counts:
            most = max(counts, key=lambda label: counts[label])
            yield Finding(
                name=EVENT_RECORD_NODES,
                severity="cost",
                keys=tuple(counts),
                evidence={
                    "nodes": sum(counts.values()),
                    "most_in_a_graph": counts[most],
                    **_cost_of_events(rank, most, counts[most]),
                    "estimated_bytes": bytes_of_nodes({_EVENT_RECORD: sum(counts.values())}),
                },
                threshold=_EVENTS,
                way_out=MIXING_OFF if run.config.parallel.nccl_graph_mixing else _NOT_MIXING,
                rank=rank.rank,
            )


def peer_copies(run: RunRecord) -> Iterator[Finding]:
    """Finds graphs in which the driver copies between devices."""
    for rank in run.ranks:
        counts = {
            label: contents.peer_copies
            for label, contents in rank.contents.items()
            if contents.peer_copies
        }
        if counts:
            most = max(counts, key=lambda label: counts[label])
            evidence: dict[str, Plain] = {"most_in_a_graph": counts[most]}
            predicted = _predicted_ns(rank, "peer-copy", counts[most])
            if predicted is not None:
                evidence["predicted_of_them_ns"] = predicted
            yield Finding(
                name=PEER_COPIES,
                severity="cost",
                keys=tuple(counts),
                evidence=evidence,
                threshold=_PEER,
                way_out="let a kernel write to the peer's memory: --all2all-backend "
                "symmetric-memory, or all-to-all through NCCL's kernels",
                rank=rank.rank,
            )


def launch_unexplained(run: RunRecord) -> Iterator[Finding]:
    """Finds keys whose launch the model of this run does not explain."""
    for rank in run.ranks:
        errors = {
            label: error
            for label, cost in rank.replay_costs.items()
            if (error := _error(cost)) is not None and abs(error) > MOST_ERROR
        }
        if errors:
            worst = max(errors, key=lambda label: abs(errors[label]))
            yield Finding(
                name=LAUNCH_UNEXPLAINED,
                severity="doubt",
                keys=tuple(errors),
                evidence=_miss(rank, worst),
                threshold=_ERROR,
                way_out="look for a kind of node that the model lacks (cgprof nodes RUN KEY), or a "
                "busy host: the time may be the host's and not the graph's",
                rank=rank.rank,
            )


def launch_model_loose(run: RunRecord) -> Iterator[Finding]:
    """Finds models that decide nothing: points scatter, or intervals hold what is far off."""
    for rank in run.ranks:
        model = rank.launch_model
        if model is None:
            continue
        shares = {
            label: share
            for label, cost in rank.replay_costs.items()
            if (share := share_of_miss(cost)) is not None
        }
        far = [label for label, share in shares.items() if abs(share) > MOST_ERROR]
        held = [label for label in far if is_inside(rank.replay_costs[label])]
        loose = is_loose(model)
        if not loose and not held:
            continue
        among = far if loose else held
        worst = max(among, key=lambda label: abs(shares[label]), default=None)
        yield Finding(
            name=MODEL_LOOSE,
            severity="doubt",
            keys=tuple(shares) if loose else tuple(held),
            evidence={
                "scatter_of_points": _scatter(model),
                "worst_point": _first(model.warm_largest_error, model.largest_error),
                "keys_near_the_model": len(shares) - len(far),
                "keys_compared": len(shares),
                **(_miss(rank, worst) if worst else {}),
            },
            threshold=_LOOSE,
            way_out=_QUIET if loose else _SEE_CAUSES,
            rank=rank.rank,
        )


def is_loose(model: LaunchModel | None) -> bool:
    """Whether the points around a model scatter so much that it decides nothing.

    Where some were launched by a warm host, as predictions are, those alone count.
    """
    scatter = None if model is None else _scatter(model)
    return scatter is not None and scatter > MOST_ERROR


def tracing_inflates(run: RunRecord) -> Iterator[Finding]:
    """Finds launches that take far longer while a tracing library is attached."""
    for rank in run.ranks:
        times = {
            label: cost.traced.median_ns / cost.idle.median_ns
            for label, cost in rank.replay_costs.items()
            if cost.traced is not None and cost.idle.median_ns
        }
        dear = {label: share for label, share in times.items() if share > MOST_INFLATION}
        if dear:
            worst = max(dear, key=lambda label: dear[label])
            cost = rank.replay_costs[worst]
            yield Finding(
                name=TRACING_INFLATES,
                severity="info",
                keys=tuple(dear),
                evidence={
                    "worst": worst,
                    "untraced_ns": cost.idle.median_ns,
                    "traced_ns": cost.traced.median_ns if cost.traced else None,
                    "our_clock_meanwhile_ns": (
                        cost.traced_wall.median_ns if cost.traced_wall else None
                    ),
                },
                threshold=_INFLATED,
                way_out="take launch times from a process in which no profiler ever ran: CUPTI "
                "costs every node of a launch, and goes on to do so once it is detached",
                rank=rank.rank,
            )


LAUNCH_CHECKS: Mapping[str, Check] = {
    EVENT_RECORD_NODES: Check(event_record_nodes, (needs.DEVICE, needs.GRAPHS)),
    PEER_COPIES: Check(peer_copies, (needs.DEVICE, needs.CONTENTS)),
    LAUNCH_UNEXPLAINED: Check(
        launch_unexplained, (needs.DEVICE, needs.REPLAY_COSTS, needs.PREDICTED)
    ),
    MODEL_LOOSE: Check(launch_model_loose, (needs.DEVICE, needs.LAUNCH_MODEL)),
    TRACING_INFLATES: Check(tracing_inflates, (needs.DEVICE, needs.REPLAY_COSTS, needs.TRACED)),
}


def _predicted_ns(rank: RankRecord, kind: NodeKind, nodes: int) -> int | None:
    model = rank.launch_model
    terms = () if model is None else model.terms
    return next((round(term.of(nodes).value) for term in terms if term.kind == kind), None)


def _cost_of_events(rank: RankRecord, label: str, count: int) -> dict[str, Plain]:
    """Of the graph that holds most: what the model says of them, and the launch as measured."""
    found: dict[str, Plain] = {}
    predicted, cost = _predicted_ns(rank, _EVENT_RECORD, count), rank.replay_costs.get(label)
    if predicted is not None:
        found["predicted_of_them_ns"] = predicted
    if cost is not None:
        found["launch_measured_ns"] = cost.idle.quiet_ns
    return found


def _error(cost: ReplayCost) -> float | None:
    """How far a prediction is off; None without one, or where its interval holds the time."""
    return None if is_inside(cost) else share_of_miss(cost)


def _miss(rank: RankRecord, label: str) -> dict[str, Plain]:
    """A launch beside its prediction, and the cause where the run can tell one."""
    cost, cause = rank.replay_costs[label], cause_of_miss(rank, label)
    return {
        "worst": label,
        "measured_ns": cost.beside.quiet_ns if cost.beside else None,
        "predicted_ns": round(cost.predicted.value) if cost.predicted else None,
        "error": share_of_miss(cost),
        "cause": cause.words if cause else None,
    }


def _scatter(model: LaunchModel) -> float | None:
    return _first(model.warm_scatter, model.scatter)


def _first(value: float | None, other: float | None) -> float | None:
    return other if value is None else value
