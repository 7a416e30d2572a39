"""What a graph's launch should cost by the model of this run, and what dominates it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cgprof.record.contents import GraphContents
from cgprof.record.cost import MIXING_OFF, LaunchModel, ReplayCost, between
from cgprof.record.graph import GraphRecord
from cgprof.record.worth import Estimate
from cgprof.units import format_ns

BASE = "base"
WAITED = "waited"

_Z_95 = 1.96  # standard deviations on each side of a 95 % interval
_WORDS: dict[str, str] = {
    BASE: "the call itself",
    WAITED: "the wait before it: a host that waited for the device finds its caches cold",
    "kernel": "{count} kernel nodes",
    "memset": "{count} memset nodes",
    "memcpy": "{count} copies on the device",
    "peer-copy": "{count} copies to a peer",
    "event-wait": "{count} event-wait nodes",
    "event-record": "{count} event-record nodes",
    "fork": "{count} forks",
}
_WAYS_OUT: dict[str, str] = {
    "event-record": f"NCCL's graph mixing adds one a collective: {MIXING_OFF}",
    "peer-copy": "let a kernel write to the peer instead",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """An estimate of a launch, its terms in ns, and the kinds of node that have no term."""

    ns: Estimate
    wait: Estimate  # the part of it that comes of the wait
    terms: Mapping[str, float]  # BASE, WAITED and the kinds of node
    counts: Mapping[str, int]
    unknown: Mapping[str, int] = field(default_factory=dict)


def predict(
    model: LaunchModel,
    nodes: Mapping[str, int],
    contents: GraphContents | None = None,
    waited_ns: int = 0,
) -> Prediction:
    """Returns the cost of launching a graph with these nodes by a host that worked, or that waited.

    Forks and copies between devices come from `contents`; without it copies count as copies on
    the device, and forks as `nodes` has them. The interval takes the terms as independent and
    includes the scatter of the points around the fit, without a wait that of such points alone.
    """
    counts = _counts(nodes, contents)
    known = {term.kind: term for term in model.terms}
    parts = {BASE: model.base_ns}
    for kind, count in counts.items():
        if kind in known:
            parts[kind] = known[kind].of(count)
    total = sum(count for kind, count in counts.items() if kind != "fork")
    parts[WAITED] = _of_wait(model, total, waited_ns)
    scatter = model.scatter if waited_ns or model.warm_scatter is None else model.warm_scatter
    return Prediction(
        ns=_together(list(parts.values()), scatter or 0.0),
        wait=parts[WAITED],
        terms={kind: part.value for kind, part in parts.items()},
        counts=counts,
        unknown={kind: count for kind, count in counts.items() if kind not in known},
    )


def dominant(prediction: Prediction) -> str:
    """Returns the largest term in words, its share, and the setting that removes it, if known."""
    kind = max(prediction.terms, key=lambda one: prediction.terms[one])
    part, whole = prediction.terms[kind], prediction.ns.value
    what = _WORDS[kind].format(count=prediction.counts.get(kind, 0))
    share = f"{part / whole:.0%}" if whole > 0 else "all"
    words = f"{what}: {format_ns(part)} of {format_ns(whole)} ({share})"
    way_out = _WAYS_OUT.get(kind)
    return f"{words}; {way_out}" if way_out else words


def with_predictions(
    model: LaunchModel,
    costs: Mapping[str, ReplayCost],
    records: Sequence[GraphRecord],
    contents: Mapping[str, GraphContents],
) -> dict[str, ReplayCost]:
    """Returns the costs with what the model makes of their graphs; keys are labels.

    The prediction is of a launch by a host that worked before it; what a wait adds stands apart,
    where one was measured. A label without a graph keeps its cost as it is.
    """
    by_label = {record.label: record for record in records if record.failure is None}
    done = {}
    for label, cost in costs.items():
        record = by_label.get(label)
        if record is None or not record.nodes:
            done[label] = cost
            continue
        inside = contents.get(label)
        found = predict(model, record.nodes, inside)
        facts = {"predicted": found.ns, "dominated_by": _in_words(found)}
        if cost.waited_ns is not None:
            facts["predicted_wait"] = predict(model, record.nodes, inside, cost.waited_ns).wait
        done[label] = cost.model_copy(update=facts)
    return done


def _in_words(prediction: Prediction) -> str:
    words = dominant(prediction)
    if not prediction.unknown:
        return words
    listed = ", ".join(f"{count} {kind}" for kind, count in sorted(prediction.unknown.items()))
    return f"{words}; not in the model: {listed}"


def _counts(nodes: Mapping[str, int], contents: GraphContents | None) -> dict[str, int]:
    """Nodes by the model's kinds: forks beside them, copies to a peer apart."""
    counts = nodes if contents is None else {**contents.kinds, "fork": contents.forks}
    return {kind: count for kind, count in counts.items() if count}


def _of_wait(model: LaunchModel, nodes: int, waited_ns: int) -> Estimate:
    knots = [0, *(term.waited_ns for term in model.waited)]
    once = between(knots, [term.ns for term in model.waited], waited_ns)
    each = between(knots, [term.ns_per_node for term in model.waited], waited_ns)
    return Estimate(
        value=once.value + each.value * nodes,
        low=once.low + each.low * nodes,
        high=once.high + each.high * nodes,
    )


def _together(parts: Sequence[Estimate], scatter: float) -> Estimate:
    value = sum(part.value for part in parts)
    spread = _Z_95 * scatter * value
    below = math.hypot(spread, *(part.value - part.low for part in parts))
    above = math.hypot(spread, *(part.high - part.value for part in parts))
    return Estimate(value=value, low=max(0.0, value - below), high=value + above)
