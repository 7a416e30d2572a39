"""What the legs of parity say of a key, and of a run. Without a replay there is no verdict."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from cgprof.record.types import GraphRecord, ParityResult
from cgprof.report.layout import Table, one_line

LEGS = ("replay-eager", "step-reference", "poisoned-padding")
PASS, FAIL, NOT_VERIFIED = "pass", "FAIL", "not verified"
_MEANINGS = (
    "replay-eager: replay against the eager step at the same padding, bitwise",
    "step-reference: the step against fresh buffers, unpadded and unsplit; within the floor, the "
    "measured difference of two eager sizes",
    "poisoned-padding: garbage in the padding against clean padding, bitwise",
)


def leg_verdict(result: ParityResult) -> str:
    """Returns pass, FAIL, or not verified; a pass that counted no replay is not one."""
    if result.passed is False:
        return FAIL
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
    return PASS if len(passed) == len(verdicts) else f"{PASS} {len(passed)} of {len(verdicts)}"


def legs_table(graphs: Sequence[GraphRecord], *, cases: bool = True) -> Table:
    """Returns one row a leg over all keys; the notes name each key that did not pass.

    `cases` lists what was varied, batch by batch; else the notes say which contexts were.
    """
    columns = {
        "leg": "leg",
        "keys": "keys",
        "passed": "pass",
        "failed": "FAIL",
        "not_verified": "not verified",
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
        if found and cases:
            notes.append(f"cases of {leg}: {', '.join(found)}")
        elif found:
            notes.append(f"{leg}: {len(found)} batches, contexts {_contexts(found)}")
    notes += [_complaint(graph, result) for graph in graphs for result in _not_passed(graph)]
    return Table(title="parity", columns=columns, rows=tuple(rows), notes=tuple(notes))


def _contexts(cases: Iterable[str]) -> str:
    texts = " ".join(case.rpartition("contexts")[2] for case in cases)
    return " ".join(map(str, sorted({int(number) for number in re.findall(r"\d+", texts)})))


def _not_passed(graph: GraphRecord) -> list[ParityResult]:
    return [result for result in graph.parity if leg_verdict(result) != PASS]


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
