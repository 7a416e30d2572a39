"""`cgprof compare`: two runs side by side, with a verdict as exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cgprof.cli import options
from cgprof.report.formats import OutputFormat

_REGRESSION = 1
_INCONCLUSIVE = 4


def compare(
    base: Annotated[Path, typer.Argument(help="The run folder to compare with.", metavar="A")],
    candidate: Annotated[Path, typer.Argument(help="The run folder to judge.", metavar="B")],
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Compare runs that are unlike; says so.")
    ] = False,
    fail_on_inconclusive: Annotated[
        bool, typer.Option("--fail-on-inconclusive", help="Exit 4 when nothing can be said.")
    ] = False,
    table: options.TableName = None,
    output_format: options.Format = OutputFormat.TEXT,
) -> None:
    """Compare run B with run A: launch time, memory and parity of every key they share.

    Tables: keys, twins, unmatched, verdicts.
    """
    from cgprof.report.compare import compare_runs

    comparison = compare_runs(base, candidate, force=force)
    options.emit(comparison.to_document(), output_format, table)
    if comparison.verdict == "regression":
        raise typer.Exit(_REGRESSION)
    if comparison.verdict == "inconclusive" and fail_on_inconclusive:
        raise typer.Exit(_INCONCLUSIVE)
