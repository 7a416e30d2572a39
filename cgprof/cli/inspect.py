"""`cgprof inspect`: what a model card says, and the memory that follows from it."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from cgprof.cli import options
from cgprof.report.formats import OutputFormat

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A bundled model, a config.json, or a directory that has one.",
        show_default=False,
    ),
]
Dtype = Annotated[
    Literal["float32", "float16", "bfloat16"] | None,
    typer.Option("--dtype", help="Of weights and KV, instead of the card's."),
]
Tokens = Annotated[
    int | None,
    typer.Option("--tokens", min=1, max=10**12, help="Also print the KV bytes of so many tokens."),
]


def inspect(
    model: Model,
    dtype: Dtype = None,
    tokens: Tokens = None,
    table: options.TableName = None,
    output_format: options.Format = OutputFormat.TEXT,
) -> None:
    """Print a model card's fields, where each came from, and the bytes of weights and KV.

    Any card with attention dimensions is sized, also one that cannot be run. Tables: fields,
    weights.
    """
    from cgprof.config.inspect import inspect_card
    from cgprof.report.inspection import inspection_document

    options.emit(
        inspection_document(inspect_card(model, dtype=dtype), tokens), output_format, table
    )
