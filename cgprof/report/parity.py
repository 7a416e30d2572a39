"""What the legs of parity say of a key, and of a run. Without a replay there is no verdict."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from cgprof.record.graph import GraphRecord, ParityResult
from cgprof.report.layout import Table, one_line

LEGS = ("replay-eager", "step-reference", "poisoned-padding")
PASS, FAIL, NOT_VERIFIED, NOT_APPLICABLE = "pass", "FAIL", "not verified", "n/a"
_MEANINGS = (
    "replay-eager: replay against the eager step at the same padding, bitwise",
    "step-reference: the step against fresh buffers, unpadded and unsplit; within the floor, the "
    "measured difference of two eager sizes",
    "poisoned-padding: garbage in the padding against clean padding, bitwise; n/a: the key was "
    "never padded",
)


def leg_verdict(result: ParityResult) -> str:
    """Returns pass, FAIL, not verified, or n/a; a pass that counted no replay is not one.

    A key whose cases have no padding row has nothing to poison: n/a, which leaves nothing open.
    """
    if result.passed is False:
        return FAIL
    tried = result.cases or result.tokens_compared or result.replays
    if result.leg == "poisoned-padding" and result.passed is None and not tried:
        return NOT_APPLICABLE
    return PASS if result.passed and result.replays > 0 else NOT_VERIFIED


def key_verdict(graph: GraphRecord) -> str:
    """Returns one word for all legs of a key; one failed leg fails it and is named."""
    verdicts = {result.leg: leg_verdict(result) for result in graph.parity}
    failed = [leg for leg, verdict in verdicts.items() if verdict == FAIL]
    passed = [leg for leg, verdict in verdicts.items() if verdict == PASS]
    if failed:
        return f"{FAIL} {' '.join(failed)}"
    if not passed:
        return NOT_VERIFIED
    asked = len(verdicts) - list(verdicts.values()).count(NOT_APPLICABLE)
    return PASS if len(passed) == asked else f"{PASS} {len(passed)} of {asked}"


def legs_table(graphs: Sequence[GraphRecord]) -> Table:
    """Returns one row a leg over all keys; the notes say what was varied and what did not pass."""
    columns = {
        "leg": "leg",
        "keys": "keys",
        "passed": "pass",
        "failed": "FAIL",
        "not_verified": "not verified",
        "not_applicable": "n/a",
        "replays": "replays",
        "tokens_compared": "tokens compared",
        "tokens_different": "tokens different",
        "nonfinite": "non-finite",
        "worst_diff": "worst diff",
        "floor": "floor",
        "tolerance": "tolerance",
    }
    rows = []
    notes = list(_MEANINGS)
    for leg in LEGS:
        results = [result for graph in graphs for result in graph.parity if result.leg == leg]
        verdicts = [leg_verdict(result) for result in results]
        rows.append(
            (
                leg,
                len(results),
                verdicts.count(PASS),
                verdicts.count(FAIL),
                verdicts.count(NOT_VERIFIED),
                verdicts.count(NOT_APPLICABLE),
                sum(result.replays for result in results),
                sum(result.tokens_compared for result in results),
                sum(result.tokens_different for result in results),
                sum(result.nonfinite for result in results),
                _largest(result.max_abs_diff for result in results),
                _largest(result.floor for result in results),
                _largest(result.tolerance for result in results),
            )
        )
        found = dict.fromkeys(case for result in results for case in result.cases)
        if found:
            kinds = ", ".join(dict.fromkeys(case.partition(":")[0] for case in found))
            count = f"{len(found)} case{'s' if len(found) > 1 else ''}"
            notes.append(f"{leg}: {count} ({kinds}), contexts {_contexts(found)}")
    notes += [_complaint(graph, result) for graph in graphs for result in _not_passed(graph)]
    return Table(
        name="parity", title="parity", columns=columns, rows=tuple(rows), notes=tuple(notes)
    )


def _contexts(cases: Iterable[str]) -> str:
    texts = " ".join(case.rpartition("contexts")[2] for case in cases)
    return " ".join(map(str, sorted({int(number) for number in re.findall(r"\d+", texts)})))


def _not_passed(graph: GraphRecord) -> list[ParityResult]:
    settled = (PASS, NOT_APPLICABLE)
    return [result for result in graph.parity if leg_verdict(result) not in settled]


def _complaint(graph: GraphRecord, result: ParityResult) -> str:
    facts = [
        f"worst diff {result.max_abs_diff:.3g}" if result.max_abs_diff is not None else "",
        f"tolerance {result.tolerance:.3g}" if result.tolerance is not None else "bitwise asked",
        f"{result.nonfinite} non-finite" if result.nonfinite else "",
        f"{result.tokens_different} of {result.tokens_compared} tokens different"
        if result.tokens_different
        else "",
        "no replay" if not result.replays else "",
        one_line(result.note),
    ]
    facts_text = ", ".join(fact for fact in facts if fact)
    return f"{leg_verdict(result)}: {graph.label}, {result.leg}: {facts_text}"


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
