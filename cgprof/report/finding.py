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


Check = Callable[[RunRecord], Iterable[Finding]]
