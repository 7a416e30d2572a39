"""Did a planted fault turn red what was stated beforehand, and would the task alone have told?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cgprof.accuracy.faults import GREEDY, WEIGHTS, Fault
from cgprof.accuracy.result import Scored
from cgprof.record.graph import GraphRecord
from cgprof.record.paired import paired_verdict
from cgprof.record.scores import GreedyResult, PairedVerdict, PlantedFault, WeightsResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Colours:
    """Legs by what they found; a leg without a verdict is in neither."""

    red: frozenset[str]
    green: frozenset[str]


def leg_colours(
    graphs: Sequence[GraphRecord], greedy: GreedyResult, weights: WeightsResult
) -> Colours:
    """Returns the legs that failed for at least one key, and those that passed and never failed."""
    found: list[tuple[str, bool | None]] = [
        (leg.leg, leg.passed) for graph in graphs for leg in graph.parity
    ]
    found += [(GREEDY, greedy.passed), (WEIGHTS, weights.passed)]
    red = frozenset(leg for leg, passed in found if passed is False)
    return Colours(red=red, green=frozenset(leg for leg, passed in found if passed) - red)


def judge_fault(
    fault: Fault, found: Colours, clean: Scored | None, faulty: Sequence[Scored]
) -> PlantedFault:
    """Returns what was stated of a fault beside what was found.

    Args:
        fault: The fault.
        found: What the legs found while it was planted.
        clean: The task by replay without the fault.
        faulty: The task with it; the replay score is compared.
    """
    return PlantedFault(
        name=fault.name,
        place=fault.place,
        what=fault.what,
        stated_red=tuple(sorted(fault.red)),
        stated_green=tuple(sorted(fault.green)),
        red=tuple(sorted(found.red)),
        green=tuple(sorted(found.green)),
        as_stated=fault.red <= found.red and fault.green <= found.green,
        task=_task_verdict(clean, faulty),
    )


def _task_verdict(clean: Scored | None, faulty: Sequence[Scored]) -> PairedVerdict | None:
    replay = next((one for one in faulty if one.result.phase == "replay"), None)
    if clean is None or replay is None:
        return None
    return paired_verdict(
        clean.result, clean.items, replay.result, replay.items, names=("clean", "faulty")
    )
