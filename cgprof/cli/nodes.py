"""`cgprof nodes`: what is inside the graphs of a run."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cgprof.cli import options
from cgprof.errors import ConfigError
from cgprof.report.formats import OutputFormat


class NodesFormat(StrEnum):
    """The formats of every command, Graphviz, and what trace viewers open."""

    TEXT = "text"
    MD = "md"
    JSON = "json"
    CSV = "csv"
    DOT = "dot"
    TRACE = "trace"


_OF_ONE_KEY = {NodesFormat.DOT: "draws", NodesFormat.TRACE: "shows"}


Run = Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN", show_default=False)]
Key = Annotated[
    str | None,
    typer.Argument(help="A key, such as FULL-8x8q1-mb2.", metavar="KEY", show_default=False),
]
Format = Annotated[
    NodesFormat,
    typer.Option("--format", help="As of other commands; of a KEY also dot, trace."),
]


def nodes(
    run: Run,
    key: Key = None,
    table: options.TableName = None,
    output_format: Format = NodesFormat.TEXT,
) -> None:
    """Print the nodes of a run's graphs by kind, their shape and their kernels.

    Without KEY one row a key; with KEY its kernels, and of a twin what it adds to its plain key;
    json and dot (Graphviz) then have every node; trace has the replay that was traced, in the
    JSON that Perfetto and chrome://tracing open. Of several ranks, the first one's. Tables: keys;
    with KEY kinds, kernels, against-plain.
    """
    from cgprof.graphs.topology import Node
    from cgprof.record.nodes import read_nodes
    from cgprof.record.store import read_run
    from cgprof.record.timeline import read_timeline
    from cgprof.report.dot import dot_text
    from cgprof.report.nodes import find_graph, key_document, nodes_document
    from cgprof.report.trace import trace_text

    record = read_run(run)
    if not record.ranks:
        raise ConfigError("RUN", f"{run}: no graph was captured yet")
    if output_format in _OF_ONE_KEY and (key is None or table is not None):
        problem = f"{_OF_ONE_KEY[output_format]} one key: name a KEY, and no --table"
        raise ConfigError(f"--format {output_format.value}", problem)
    if key is None:
        options.emit(nodes_document(record), OutputFormat(output_format), table)
        return
    graph = find_graph(record, key)
    if output_format is NodesFormat.TRACE:
        typer.echo(trace_text(key, read_timeline(run, key)))
        return
    found = None
    if output_format in (NodesFormat.DOT, NodesFormat.JSON) and table is None:
        contents = record.ranks[0].contents.get(graph.label)
        count = None if contents is None else sum(contents.kinds.values())
        found = [Node(*row) for row in read_nodes(run, key, count)]
    if found is not None and output_format is NodesFormat.DOT:
        typer.echo(dot_text(key, found))
        return
    options.emit(key_document(record, key, found), OutputFormat(output_format), table)
