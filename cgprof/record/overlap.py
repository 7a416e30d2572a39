"""What one traced replay spent its time on; every activity of it is in timelines.parquet."""

from __future__ import annotations

from cgprof.record.strict import NonNegative, Record


class TracedReplay(Record):
    """What one traced replay spent its time on. Tracing stretches it: no time of the graph's."""

    activities: NonNegative
    nodes: NonNegative | None = None  # of the graph that run on the device; None: not read
    agrees: bool | None = None  # whether activities and nodes are as many of each kind
    transfers: NonNegative  # activities that communicate
    streams: NonNegative  # that ran any activity
    span_ns: NonNegative  # from the first begin to the last end
    compute_ns: NonNegative  # at least one activity computed
    communication_ns: NonNegative  # at least one communicated
    both_ns: NonNegative  # at least one of either
    neither_ns: NonNegative

    @property
    def hidden(self) -> float | None:
        """The share of communication beside which something computed; None without any."""
        return self.both_ns / self.communication_ns if self.communication_ns else None
