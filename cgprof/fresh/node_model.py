"""How many bytes a node costs: a line through the graphs that were measured alone. Pure.

What a graph takes alone is made of four parts, and only one kind of them follows its nodes:

- pool: memory of activations. It depends on the tokens and on the operators; graphs of one process
  share it, so that only the most demanding one adds to it. Not modelled.
- workspaces: what libraries keep for a thread and a stream. It belongs to the process and was there
  before the reading. Not modelled.
- instantiate and upload: the driver's copy of the graph on the device, a record for each node.
- rest: what the driver took in other moments of the capture, hence also for its graph.

The last two together, the driver's part, are fitted as base + per_node x nodes. The base is what
the driver needs for the first graph of a process at all, less the room that its arena has from the
start, so it may be below zero. The driver takes memory in steps of
2 MiB, at times of many: every figure is up to one step above what the nodes need, and two graphs
whose nodes differ by less than a step may read alike. The base holds the mean of that surplus, and
the fit's errors its scatter. No estimate is nearer than one step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cgprof.record.alone import NodeModel, StandAlone
from cgprof.record.worth import Estimate
from cgprof.stats.line import fit_line
from cgprof.units import format_bytes

_FEWEST = 3
_ONE_STRAIGHT_LINE = (
    "only two unlike numbers of nodes were measured: that bytes grow evenly between is assumed"
)


def fit(measured: Sequence[StandAlone]) -> tuple[NodeModel | None, str]:
    """Returns the model, or None and why there is none.

    It takes three keys or more whose nodes are not all equally many.
    """
    usable: list[tuple[str, int, int]] = []
    unusable = []
    for one in measured:
        problem = _problem(one)
        if problem is None and one.driver_bytes is not None:
            usable.append((one.label, one.nodes, one.driver_bytes))
        else:
            unusable.append(f"{one.label}: {problem}")
    points = tuple((nodes, size) for _, nodes, size in usable)
    line = fit_line(points)
    if line is None:
        return None, "; ".join([_too_little(points), *unusable])
    if line.slope <= 0:
        return None, (
            f"no model of bytes by nodes: larger graphs took no more ({_listed(points)}), the "
            "steps of the driver's arena hide what a node costs"
        )
    notes = [f"not fitted on {text}" for text in unusable]
    if len({nodes for nodes, _ in points}) == 2:
        notes.append(_ONE_STRAIGHT_LINE)
    model = NodeModel(
        base_bytes=line.base,
        per_node_bytes=Estimate(
            value=line.slope,
            low=line.slope - line.slope_half_width,
            high=line.slope + line.slope_half_width,
        ),
        largest_error_bytes=math.ceil(line.largest_residual),
        fitted_on=tuple(label for label, _, _ in usable),
        points=points,
        notes=tuple(notes),
    )
    return model, ""


def _problem(one: StandAlone) -> str | None:
    """Why a key is no point of the line."""
    if one.failure is not None:
        return one.failure
    if one.witness is not None and one.witness.neighbours == "moved":
        return "another process took or gave back device memory meanwhile"
    if one.witness is not None and one.witness.device_delta_bytes is None:
        return "a tape has no driver that keeps its nodes"
    if one.driver_bytes is None:
        return "its driver's part was not read, or came out below zero"
    return None


def _too_little(points: Sequence[tuple[int, int]]) -> str:
    if len(points) < _FEWEST:
        return f"no model of bytes by nodes: {len(points)} usable keys alone, {_FEWEST} are needed"
    return f"no model of bytes by nodes: all measured keys have {points[0][0]} nodes"


def _listed(points: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{nodes} nodes {format_bytes(size)}" for nodes, size in sorted(points))
