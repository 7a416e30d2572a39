"""`cgprof report`: what earlier runs found."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cgprof.cli import options
from cgprof.cli.options import OutputFormat

Runs = Annotated[list[Path], typer.Argument(help="Run folders.", metavar="RUN...")]


def report(runs: Runs, output_format: options.Format = OutputFormat.TEXT) -> None:
    """Print the full report of one or more run folders."""
    from cgprof.record.store import read_run
    from cgprof.report.tables import report_text

    records = [read_run(path) for path in runs]
    if output_format is OutputFormat.JSON:
        documents = [record.model_dump_json(indent=2) for record in records]
        typer.echo(documents[0] if len(documents) == 1 else f"[{','.join(documents)}]")
    else:
        typer.echo("\n\n".join(report_text(record) for record in records))
