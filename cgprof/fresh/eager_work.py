"""The work of a graph against that of an eager step at the same padding. Pure.

What is compared: kernels by name, and copies and memsets by kind. What is not: nodes that order
work and do none (events, empty nodes), and host and memory nodes, which no device activity shows.

Both sides run the same Python at equal padding and split, with the same seeds, after a warm-up, and
their matmuls see the same shapes, alignments and workspaces, so that a library has no reason to
choose another kernel. Inputs, logits and the poisoning of rows lie outside both. So there is no
general exception: one that is needed has to be declared here, with its reason.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cgprof.fresh.start import FreshAnswer
from cgprof.record.contents import Counts, GraphContents, WorkDifference

# A copy is one activity, whichever kind of node holds it.
_KINDS = {
    "memcpy": "memcpy",
    "peer-copy": "memcpy",
    "memset": "memset",
    "collective": "collective",
}


@dataclass(frozen=True, slots=True)
class DeclaredException:
    """Work that may rightly differ: a pattern that its whole name matches, and why."""

    pattern: str
    reason: str


DECLARED: tuple[DeclaredException, ...] = ()


def graph_work(contents: GraphContents) -> Counts:
    """Returns the work that a graph holds: kernels by name, copies and memsets by kind."""
    work = Counter(contents.kernels)
    for kind, count in contents.kinds.items():
        if kind in _KINDS:
            work[_KINDS[kind]] += count
    return dict(work)


def difference(
    graph_kernels: Counts,
    eager_kernels: Counts,
    exceptions: Sequence[DeclaredException] = DECLARED,
) -> WorkDifference:
    """Returns what one side has more of; what an exception names is told apart."""
    missing, surplus = Counter(eager_kernels), Counter(graph_kernels)
    missing.subtract(graph_kernels)
    surplus.subtract(eager_kernels)
    unlike = {name for name, count in missing.items() if count}
    excepted = {
        name: reason for name in sorted(unlike) if (reason := _reason(name, exceptions)) is not None
    }
    told = unlike - excepted.keys()
    return WorkDifference(
        missing={name: missing[name] for name in sorted(told) if missing[name] > 0},
        surplus={name: surplus[name] for name in sorted(told) if surplus[name] > 0},
        excepted=excepted,
        equal=not told,
    )


def compare_work(
    contents: Mapping[str, GraphContents], answer: FreshAnswer
) -> dict[str, WorkDifference]:
    """Returns the difference of each graph, by label; where no eager step is known, why."""
    found = {}
    for label, graph in contents.items():
        eager = answer.work.get(label)
        if eager is None:
            note = answer.problems.get(label) or answer.failure or "no eager step of it was run"
            one = WorkDifference(note=note)
        else:
            one = difference(graph_work(graph), eager)
        found[label] = one.model_copy(update={"process_id": answer.process_id})
    return found


def _reason(name: str, exceptions: Sequence[DeclaredException]) -> str | None:
    matching = (rule.reason for rule in exceptions if re.fullmatch(rule.pattern, name))
    return next(matching, None)
