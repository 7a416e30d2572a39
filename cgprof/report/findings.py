"""All checks over a run, and what they found, worst first: for people and for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import get_args

from cgprof.record.types import RunRecord
from cgprof.report.checks_of_graphs import GRAPH_CHECKS
from cgprof.report.checks_of_launch import LAUNCH_CHECKS
from cgprof.report.checks_of_memory import MEMORY_CHECKS
from cgprof.report.checks_of_timing import TIMING_CHECKS
from cgprof.report.document import Block, Lines
from cgprof.report.finding import Check, Finding, Severity
from cgprof.report.layout import Plain, Table, finite, one_line, show
from cgprof.units import format_ranges

CHECKS: Mapping[str, Check] = MappingProxyType(
    {**GRAPH_CHECKS, **MEMORY_CHECKS, **LAUNCH_CHECKS, **TIMING_CHECKS}
)

_COLUMNS = {
    "severity": "severity",
    "finding": "finding",
    "rank": "rank",
    "num_keys": "keys",
    "keys": "which",
    "evidence": "evidence",
    "threshold": "found when",
    "way_out": "way out",
}
_MOST_LISTED = 3
_WORST_FIRST = get_args(Severity)


def find(run: RunRecord) -> tuple[Finding, ...]:
    """Returns what all checks find in a run, faults first."""
    found = [finding for check in CHECKS.values() for finding in check.find(run)]
    return tuple(sorted(found, key=lambda finding: _WORST_FIRST.index(finding.severity)))


def blind_lines(run: RunRecord) -> list[str]:
    """Returns how many checks had nothing to look at, then a line a reason; nothing if all had."""
    by_reason: dict[str, list[str]] = {}
    for name, check in CHECKS.items():
        lacking = check.lacking(run)
        if lacking is not None:
            by_reason.setdefault(lacking, []).append(name)
    if not by_reason:
        return []
    count = sum(map(len, by_reason.values()))
    return [
        f"{count} of {len(CHECKS)} checks had nothing to look at:",
        *(f"  {', '.join(names)} ({reason})" for reason, names in by_reason.items()),
    ]


def findings_table(run: RunRecord) -> Table:
    """Returns one row a finding and rank; evidence is name=number, in the unit of its name."""
    return Table(
        name="findings",
        columns=_COLUMNS,
        rows=tuple(
            (
                finding.severity,
                finding.name,
                finding.rank,
                len(finding.keys),
                " ".join(finding.keys) or None,
                _raw(finding.evidence),
                finding.threshold,
                finding.way_out,
            )
            for finding in find(run)
        ),
        notes=tuple(blind_lines(run)),
    )


def findings_blocks(run: RunRecord) -> list[Block]:
    """Returns the findings as people read them; ranks that share one are told in one place."""
    found, blind = find(run), blind_lines(run)
    if not found:
        return [Lines(lines=[f"findings: none of {len(CHECKS)} checks", *blind])]
    grouped: dict[tuple[str, str], list[Finding]] = {}
    for finding in found:
        grouped.setdefault((finding.name, finding.way_out), []).append(finding)
    names = len({finding.name for finding in found})
    lines = [line for group in grouped.values() for line in _lines(run, group)]
    return [Lines(title=f"findings: {names} of {len(CHECKS)} checks", lines=[*lines, *blind])]


def _lines(run: RunRecord, group: Sequence[Finding]) -> list[str]:
    first = group[0]
    where = ""
    if len(run.ranks) > 1:
        ranks = format_ranges([finding.rank for finding in group])
        where = f" on rank {ranks}" if len(group) == 1 else f" on ranks {ranks}, here {first.rank}"
    facts = ", ".join(filter(None, (_keys(run, first), _evidence(first.evidence))))
    return [
        f"{first.severity}: {first.name}{where}: {one_line(facts)}",
        f"  found when {one_line(first.threshold)}",
        f"  way out: {one_line(first.way_out)}",
    ]


def _keys(run: RunRecord, finding: Finding) -> str:
    keys = finding.keys
    if not keys:
        return ""
    of_rank = [len(rank.graphs) for rank in run.ranks if rank.rank == finding.rank]
    if len(keys) <= _MOST_LISTED:
        return " ".join(keys)
    if len(keys) == sum(of_rank):
        return f"all {len(keys)} keys"
    return f"{len(keys)} of {sum(of_rank)} keys ({' '.join(keys[:_MOST_LISTED])} ...)"


def _evidence(evidence: Mapping[str, Plain]) -> str:
    return ", ".join(
        f"{_words(name)} {show(name, value)}"
        for name, value in evidence.items()
        if value is not None
    )


def _words(name: str) -> str:
    for suffix in ("_bytes", "_ns", "_ratio"):
        name = name.removesuffix(suffix)
    return name.replace("_", " ")


def _raw(evidence: Mapping[str, Plain]) -> str:
    return "; ".join(f"{name}={finite(value)}" for name, value in evidence.items())
