"""What one replay call costs: alone, idle and busy; inside steps; and as CUPTI saw it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from cgprof.record.cost import ReplayCost
from cgprof.record.graph import GraphRecord, LaunchStats
from cgprof.record.types import RankRecord
from cgprof.report.checks_of_launch import is_loose
from cgprof.report.layout import Cell, Table, one_line

# Column stem -> what people read. Each has a median, p90 and p99.
_SERIES = {
    "idle": "idle",
    "idle_cpu": "idle CPU",
    "busy": "busy",
    "busy_cpu": "busy CPU",
    "hot": "hot",
    "round_robin": "round robin",
    "traced": "traced",
    "traced_wall": "traced wall",
}
# The words of a cost's largest term: what, its time of the whole, its share, and the way out.
_SHARE = re.compile(r"(?P<what>.*): \S+ \S+ of \S+ \S+ \((?P<share>\d+)%\)(?P<way_out>.*)")
_COLUMNS = {
    "key": "key",
    "first_ns": "first",
    **{
        f"{stem}{tail}_ns": tail[1:] or words
        for stem, words in _SERIES.items()
        for tail in ("", "_p90", "_p99")
    },
    "predicted_ns": "model",
    "samples": "n",
}
_OPTIONAL = frozenset(
    name
    for name in _COLUMNS
    if "_p9" in name or name.startswith(("busy", "traced", "predicted", "first", "round"))
)


def launches_table(rank: RankRecord, recorder: Literal["cuda", "tape"]) -> Table:
    """Returns one row a key whose replay call was timed by itself, and how each time is made."""
    graphs = [graph for graph in rank.graphs if graph.label in rank.replay_costs]
    return Table(
        name="launches",
        title="what one replay call costs",
        columns=_COLUMNS,
        rows=tuple(_row(graph, rank.replay_costs[graph.label]) for graph in graphs),
        notes=(*_measured(rank, recorder), *what_dominates(rank)),
        optional=_OPTIONAL,
    )


def what_dominates(rank: RankRecord) -> list[str]:
    """Returns in words what the model finds to be the largest term, its share and its keys."""
    shares: dict[str, dict[str, int]] = {}
    for label, cost in rank.replay_costs.items():
        found = _SHARE.fullmatch(one_line(cost.dominated_by))
        if found is not None:
            what = found["what"] + found["way_out"]
            shares.setdefault(what, {})[label] = int(found["share"])
    doubt = "; the model is loose in this run" if is_loose(rank.launch_model) else ""
    return [
        f"the model's estimate is mostly {what} ({_percent(list(of.values()))} of it, "
        f"{len(of)} of {len(rank.replay_costs)} keys){doubt}"
        for what, of in shares.items()
    ]


def _percent(shares: Sequence[int]) -> str:
    low, high = min(shares), max(shares)
    return f"{low}%" if low == high else f"{low} to {high}%"


def _row(graph: GraphRecord, cost: ReplayCost) -> tuple[Cell, ...]:
    series = (
        *(cost.idle, cost.idle_cpu, cost.busy, cost.busy_cpu),
        graph.replay.launch if graph.replay else None,
        graph.round_robin.launch if graph.round_robin else None,
        cost.traced,
        cost.traced_wall,
    )
    return (
        graph.label,
        graph.first_replay_ns,
        *(cell for stats in series for cell in _cells(stats)),
        round(cost.predicted.value) if cost.predicted else None,
        cost.idle.count,
    )


def _cells(stats: LaunchStats | None) -> tuple[Cell, Cell, Cell]:
    if stats is None:
        return (None, None, None)
    return (stats.median_ns, stats.p90_ns, stats.p99_ns)


def _measured(rank: RankRecord, recorder: Literal["cuda", "tape"]) -> list[str]:
    costs = rank.replay_costs.values()
    if not costs:
        return []
    notes = ["CPU stand-in times (tape), never GPU times"] if recorder == "tape" else []
    notes += [
        "a server's step pays what round robin shows, one repeated key what hot shows; the calls "
        "alone come from other seconds, and a host changes its pace: subtract no columns",
        "idle: host time of the replay call alone, the device synchronised before each; inputs "
        "written once, one round thrown away; medians with p90 and, from a hundred samples on, p99",
        "CPU: the calling thread's CPU time, of other calls taken by turns with those; "
        "n: calls of each kind",
        "first, hot, round robin: launch of whole steps, each after its inputs were written: the "
        "first replay, the same key again and again, all keys in turn",
    ]
    if any(cost.busy for cost in costs):
        notes.append(
            "busy: the same call with one replay enqueued just before it; a graph shorter than "
            "its own launch may be done by then, so that its busy is idle"
        )
    if any(cost.traced for cost in costs):
        notes.append(
            "traced: host interval of cudaGraphLaunch by CUPTI's runtime API records alone (no "
            "kernel records), device idle, in a pass of its own after all timing; attaching CUPTI "
            "makes a launch dearer by each node, so compare it with traced wall, our clock around "
            "the same calls, and not with idle"
        )
    if any(cost.predicted for cost in costs):
        notes.append(
            "model: an estimate from synthetic graphs, not a time: "
            + (
                "of a launch on an idle device by a host that worked until then, as in a step; "
                "what a wait adds is in --table launch-fit"
                if rank.launch_model is not None and rank.launch_model.worked_ns is not None
                else "of the call that took turns with them (--table launch-fit), else of idle"
            )
        )
    if any(_is_of_another(graph, rank.replay_costs) for graph in rank.graphs):
        notes.append(
            "first, hot and round robin of some keys are an earlier process's than the calls "
            "alone, in a run that was resumed (--table captures)"
        )
    return [
        *notes,
        *_with_keys(rank, lambda cost: cost.busy_note, "no busy:"),
        *_with_keys(rank, lambda cost: cost.traced_note, "not traced:"),
    ]


def _is_of_another(graph: GraphRecord, costs: Mapping[str, ReplayCost]) -> bool:
    """Whether its steps were timed by another process than its replay call alone."""
    cost = costs.get(graph.label)
    if cost is None or cost.process_id is None:
        return False
    return any(
        process_id not in (None, cost.process_id)
        for process_id in (graph.timing_process_id, graph.round_robin_process_id)
    )


def _with_keys(rank: RankRecord, text_of: Callable[[ReplayCost], str], head: str) -> list[str]:
    """Each text once, with the keys that it holds for if those are not all."""
    keys: dict[str, list[str]] = {}
    for label, cost in rank.replay_costs.items():
        if text_of(cost):
            keys.setdefault(text_of(cost), []).append(label)
    return [
        f"{head} {one_line(text)}{_which(labels, len(rank.replay_costs))}"
        for text, labels in keys.items()
    ]


def _which(labels: list[str], of: int) -> str:
    if len(labels) == of:
        return ""
    more = "" if len(labels) == 1 else f" and {len(labels) - 1} more"
    return f" ({labels[0]}{more})"
