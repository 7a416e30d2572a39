"""Graph memory as it was estimated before capture, beside what a run measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cgprof.graphs.estimate import ERROR_BYTES, PlanEstimate, estimate_plan
from cgprof.record.graph import MemoryTotals
from cgprof.record.types import RankRecord, RunRecord
from cgprof.report.headline import size_text
from cgprof.report.layout import Table, format_ratio, ratio

_NVML, _DEVICE = "NVML, this process", "device delta"


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateRow:
    """One part of a rank's graph memory, estimated and measured."""

    rank: int
    part: str  # "plain", "twins" or "all"
    estimate_bytes: int
    measured_bytes: int
    measured_by: str
    error_share: float | None  # that the estimate states; None: it states none

    @property
    def measured_over_estimate(self) -> float | None:
        """How many times the estimate was measured; None where nothing was estimated."""
        return ratio(self.measured_bytes, self.estimate_bytes)

    @property
    def is_off(self) -> bool:
        """Whether the two differ by more than the estimate states."""
        if self.error_share is None:
            return False
        allowed = max(self.error_share * self.estimate_bytes, ERROR_BYTES)
        return abs(self.measured_bytes - self.estimate_bytes) > allowed


def plan_estimate_line(estimate: PlanEstimate) -> str:
    """Returns what a plan's graphs are estimated to take, and how sure that is."""
    size = f"{size_text(estimate.plain_bytes)} plain"
    if estimate.twin_bytes is not None:
        size += f" + {size_text(estimate.twin_bytes)} twins"
    line = f"estimate of graph memory: {size} ({_surety(estimate.error_share)}; not measured)"
    if estimate.finish_bytes is None:
        return line
    return f"{line}; beside it {size_text(estimate.finish_bytes)} of graphs that finish steps"


def estimate_rows(record: RunRecord) -> tuple[EstimateRow, ...]:
    """Returns each rank's totals beside the estimate for the keys that it captured.

    No rows for a tape, whose arena is no device memory, nor before the totals are known.
    """
    return tuple(row for rank in record.ranks for row in _rank_rows(record, rank))


def estimates_table(record: RunRecord) -> Table:
    """Returns the rows as a table."""
    columns = {
        "rank": "rank",
        "part": "keys",
        "estimate_bytes": "estimate",
        "measured_bytes": "measured",
        "measured_over_estimate_ratio": "measured/estimate",
        "measured_by": "measured by",
    }
    rows = estimate_rows(record)
    surety = _surety(rows[0].error_share) if rows else ""
    return Table(
        name="estimates",
        title="graph memory, estimated before capture and measured",
        columns=columns,
        rows=tuple(
            (
                row.rank,
                row.part,
                row.estimate_bytes,
                row.measured_bytes,
                row.measured_over_estimate,
                row.measured_by,
            )
            for row in rows
        ),
        notes=(f"estimate: {surety}",) if rows else (),
    )


def estimate_lines(record: RunRecord) -> list[str]:
    """Returns estimate and measurement of each rank in a line."""
    lines = []
    for row in estimate_rows(record):
        if row.part == "all":
            prefix = f"rank {row.rank}: " if len(record.ranks) > 1 else ""
            lines.append(
                f"{prefix}graph memory by estimate before capture: {size_text(row.estimate_bytes)} "
                f"({_surety(row.error_share)}); measured: {size_text(row.measured_bytes)} "
                f"({format_ratio(row.measured_over_estimate)})"
            )
    return lines


def estimate_warnings(record: RunRecord) -> list[str]:
    """Returns a line for each part that is off by more than its estimate states."""
    return [
        f"rank {row.rank}: graph memory of {_words(row.part)}: {size_text(row.measured_bytes)} "
        f"measured ({row.measured_by}), {size_text(row.estimate_bytes)} estimated: off by more "
        f"than {_percent(row.error_share)}; look at the parts of each key, or at other processes"
        for row in estimate_rows(record)
        if row.is_off and row.error_share is not None
    ]


def _rank_rows(record: RunRecord, rank: RankRecord) -> Iterator[EstimateRow]:
    totals = rank.totals
    if totals is None or totals.source != "device":
        return
    keys = [graph.key for graph in rank.graphs if graph.failure is None]
    estimate = estimate_plan(record.model, record.config, keys)
    plain, twins, measured_by = _measured(totals)
    parts = [("plain", estimate.plain_bytes, plain)]
    if estimate.twin_bytes is None:
        twins = 0
    else:
        parts.append(("twins", estimate.twin_bytes, twins))
    parts.append(("all", estimate.total_bytes, plain + twins))
    for part, estimated, measured in parts:
        yield EstimateRow(
            rank=rank.rank,
            part=part,
            estimate_bytes=estimated,
            measured_bytes=measured,
            measured_by=measured_by,
            error_share=estimate.error_share,
        )


def _measured(totals: MemoryTotals) -> tuple[int, int, str]:
    """Bytes of plain keys and twins; NVML's, which count this process alone, if there are any."""
    plain = totals.plain_witness.nvml_delta_bytes
    twins = totals.twin_witness.nvml_delta_bytes
    if plain is None or twins is None:
        return totals.plain_bytes, totals.twin_bytes, _DEVICE
    return plain, twins, _NVML


def _surety(error_share: float | None) -> str:
    source = "from H200 figures of this engine"
    if error_share is None:
        return f"{source}, never compared with this exchange"
    return f"+-{_percent(error_share)} or {size_text(ERROR_BYTES)}, {source}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _words(part: str) -> str:
    return {"plain": "plain keys", "twins": "twins", "all": "all keys"}[part]
