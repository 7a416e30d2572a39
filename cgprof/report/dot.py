"""A graph in the language of Graphviz."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cgprof.graphs.topology import KERNEL, Node, communicates, longest_path
from cgprof.report.kernel_names import short_name
from cgprof.report.layout import one_line

_NAME_LENGTH = 60


def dot_text(label: str, nodes: Sequence[Node]) -> str:
    """Returns a digraph: boxes are kernels, filled ones communicate, dashed ones are off the path.

    The path is the one that the counts of nodes beside it were taken of.
    """
    return "\n".join(_lines(label, nodes))


def _lines(label: str, nodes: Sequence[Node]) -> Iterator[str]:
    on_path = set(longest_path(nodes))
    yield f"digraph {_quoted(label)} {{"
    yield "  node [fontsize=10];"
    for index, node in enumerate(nodes):
        shape = "box" if node.kind == KERNEL else "ellipse"
        styles = ["filled"] if communicates(node) else []
        styles += [] if index in on_path else ["dashed"]
        style = f", style={_quoted(','.join(styles))}" if styles else ""
        name = one_line(short_name(node.name), _NAME_LENGTH) if node.name else node.kind
        yield f"  n{index} [label={_quoted(f'{index} {name}')}, shape={shape}{style}];"
    for index, node in enumerate(nodes):
        for before in node.after:
            yield f"  n{before} -> n{index};"
    yield "}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
