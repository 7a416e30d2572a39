"""What the votes of all ranks are remembered by."""

from __future__ import annotations

from cgprof.record.strict import NonNegative, Record
from cgprof.shapes import VetoReason


class VetoCount(Record):
    """How often one rank kept a step from being split that another rank wished to split."""

    rank: NonNegative
    reason: VetoReason
    count: NonNegative
