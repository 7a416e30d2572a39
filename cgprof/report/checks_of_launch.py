"""Checks of launch times: what they are spent on, and whether they can be trusted. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cgprof.graphs.estimate import bytes_of_nodes
from cgprof.record.cost import MIXING_OFF, LaunchModel, NodeKind, ReplayCost
from cgprof.record.types import RankRecord, RunRecord
from cgprof.report.finding import Check, Finding
from cgprof.report.layout import Plain

EVENT_RECORD_NODES = "event-record-nodes"
PEER_COPIES = "peer-copies"
LAUNCH_UNEXPLAINED = "launch-unexplained"
TRACING_INFLATES = "tracing-inflates"
MODEL_LOOSE = "launch-model-loose"
THROTTLED = "throttled-clocks"
NOISY = "noisy-timing"

MOST_ERROR = 0.3  # of a predicted launch, relative to the measured one
MOST_INFLATION = 3.0  # of a launch under CUPTI, over one in a process that never had it

_EVENT_RECORD: NodeKind = "event-record"
_EVENTS = "a graph holds an event-record node"
_PEER = "a graph holds a copy between devices that the driver makes, about 1 us each"
_ERROR = (
    f"the launch model is more than {MOST_ERROR:.0%} off the measured launch, which lies outside "
    "of its 95 % interval"
)
_LOOSE = f"points scatter around the launch model by more than {MOST_ERROR:.0%}"
_INFLATED = f"a launch takes more than {MOST_INFLATION:g} times as long with CUPTI attached"
_HELD_BACK = "NVML said that the clocks were held back while a key was timed"
_WIDE = "quartiles of launch are as far apart as measure.relative_noise, or samples too few"
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
                way_out="let a kernel write to the peer's memory; --all2all-backend all-to-all "
                "sends through NCCL's kernels",
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
            cost = rank.replay_costs[worst]
            yield Finding(
                name=LAUNCH_UNEXPLAINED,
                severity="doubt",
                keys=tuple(errors),
                evidence={
                    "worst": worst,
                    "measured_ns": cost.beside.median_ns if cost.beside else None,
                    "predicted_ns": round(cost.predicted.value) if cost.predicted else None,
                    "error": errors[worst],
                },
                threshold=_ERROR,
                way_out="look for a kind of node that the model lacks (cgprof nodes RUN KEY), or a "
                "busy host: the time may be the host's and not the graph's",
                rank=rank.rank,
            )


def launch_model_loose(run: RunRecord) -> Iterator[Finding]:
    """Finds models whose intervals are so wide that no launch can contradict them."""
    for rank in run.ranks:
        model = rank.launch_model
        if model is None or not is_loose(model):
            continue
        beside = {label: cost for label, cost in rank.replay_costs.items() if cost.beside}
        near = [
            label
            for label, cost in beside.items()
            if (share := _share(cost)) is not None and abs(share) <= MOST_ERROR
        ]
        yield Finding(
            name=MODEL_LOOSE,
            severity="doubt",
            keys=tuple(beside),
            evidence={
                "scatter_of_points": model.scatter,
                "worst_point": model.largest_error,
                "keys_near_the_model": len(near),
                "keys_compared": len(beside),
            },
            threshold=_LOOSE,
            way_out="the host changed its pace while synthetic graphs were timed: the launch model "
            "of this run is inconclusive; run again on a quiet host",
            rank=rank.rank,
        )


def is_loose(model: LaunchModel | None) -> bool:
    """Whether the points around a model scatter so much that it decides nothing."""
    return model is not None and model.scatter is not None and model.scatter > MOST_ERROR


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


def throttled_clocks(run: RunRecord) -> Iterator[Finding]:
    """Finds keys that were timed while the device was held back."""
    for rank in run.ranks:
        warned = _warned(rank, "throttled")
        if warned:
            reasons = dict.fromkeys(text.partition(": ")[2] for text in warned.values())
            yield Finding(
                name=THROTTLED,
                severity="doubt",
                keys=tuple(warned),
                evidence={"reasons": ", ".join(reasons)},
                threshold=_HELD_BACK,
                way_out="let the device cool or raise its power limit, then time again; launch "
                "times of the host stand, device times do not",
                rank=rank.rank,
            )


def noisy_timing(run: RunRecord) -> Iterator[Finding]:
    """Finds keys whose launch times scatter, all in one finding."""
    for rank in run.ranks:
        warned = _warned(rank, "noisy")
        if warned:
            noises = [
                stats.launch.noise
                for graph in rank.graphs
                for stats in (graph.eager, graph.replay)
                if graph.label in warned and stats is not None and stats.launch.noise is not None
            ]
            yield Finding(
                name=NOISY,
                severity="info",
                keys=tuple(warned),
                evidence={
                    "largest_noise": max(noises, default=None),
                    "wanted": run.config.measure.relative_noise,
                },
                threshold=_WIDE,
                way_out="compare only what one run measured; a quiet host, or more samples "
                "(measure.max_samples, measure.max_seconds_per_key), narrows it",
                rank=rank.rank,
            )


LAUNCH_CHECKS: Mapping[str, Check] = {
    EVENT_RECORD_NODES: event_record_nodes,
    PEER_COPIES: peer_copies,
    LAUNCH_UNEXPLAINED: launch_unexplained,
    MODEL_LOOSE: launch_model_loose,
    TRACING_INFLATES: tracing_inflates,
    THROTTLED: throttled_clocks,
    NOISY: noisy_timing,
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
        found["launch_measured_ns"] = cost.idle.median_ns
    return found


def _error(cost: ReplayCost) -> float | None:
    """How far a prediction is off; None without one, or where its interval holds the time."""
    share = _share(cost)
    if share is None or cost.predicted is None or cost.beside is None:
        return None
    inside = cost.predicted.low <= cost.beside.median_ns <= cost.predicted.high
    return None if inside else share


def _share(cost: ReplayCost) -> float | None:
    """How far a prediction is off what was timed beside it, relative to that."""
    if cost.predicted is None or cost.beside is None or not cost.beside.median_ns:
        return None
    return cost.predicted.value / cost.beside.median_ns - 1


def _warned(rank: RankRecord, kind: str) -> dict[str, str]:
    return {
        graph.label: text
        for graph in rank.graphs
        for text in graph.warnings
        if text.partition(":")[0] == kind
    }
