"""`cgprof report`: what earlier runs found."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cgprof.cli import options
from cgprof.report.formats import OutputFormat

Runs = Annotated[list[Path], typer.Argument(help="Run folders.", metavar="RUN...")]


def report(
    runs: Runs,
    table: options.TableName = None,
    output_format: options.Format = OutputFormat.TEXT,
) -> None:
    """Print the full report of one or more run folders.

    Findings come first: what the numbers say, and the way out.

    Tables: keys, findings, parity, stages, memory, totals, graphs, captures, remarks, skipped,
    checks, accuracy, verdicts; estimates, memory-sum, alone, launches, launch-model, launch-fit,
    overlap, eager-work; worth of --dbo-worth; of several ranks: ranks, rank-memory,
    rank-replays, rank-decisions.
    """
    from cgprof.record.store import read_run
    from cgprof.report.tables import report_document

    records = [read_run(path) for path in runs]
    options.emit(report_document(records), output_format, table)
