"""What a check over a run says: its numbers, its threshold and the way out. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from cgprof.record.types import RunRecord
from cgprof.report.layout import Plain

# fault: a graph is wrong; doubt: a figure is not to be trusted; cost: something can be cheaper.
Severity = Literal["fault", "doubt", "cost", "info"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that a check found on one rank; `keys` empty: it is of the whole rank.

    Units are in the names of the evidence. `threshold` says when the check finds something.
    """

    name: str
    severity: Severity
    threshold: str
    way_out: str
    keys: tuple[str, ...] = ()
    evidence: Mapping[str, Plain] = field(default_factory=dict)
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Need:
    """Something that a check reads; `lacking` is what a report says where it is not there."""

    lacking: str
    is_there: Callable[[RunRecord], bool]


@dataclass(frozen=True, slots=True)
class Check:
    """A check over a run. Where one of its needs is not there it has nothing to look at."""

    find: Callable[[RunRecord], Iterable[Finding]]
    needs: tuple[Need, ...]

    def lacking(self, run: RunRecord) -> str | None:
        """Returns the first thing that a run does not hold for this check, or None."""
        return next((need.lacking for need in self.needs if not need.is_there(run)), None)
