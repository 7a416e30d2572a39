"""A traced replay in the JSON that trace viewers open: Perfetto, chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from cgprof.graphs.topology import KERNEL
from cgprof.record.timeline import Activity
from cgprof.report.kernel_names import short_name

_ROLES = ("compute", "communication")
_NS_PER_US = 1e3


def trace_text(label: str, found: Sequence[Activity]) -> str:
    """Returns one process a role and in it one thread a stream; full names are in the details.

    Source: Trace Event Format of the Chromium project: complete events and metadata, in us.
    """
    events = [*_titles(label), *map(_event, found)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}, allow_nan=False)


def _titles(label: str) -> Iterator[dict[str, object]]:
    for place, role in enumerate(_ROLES):
        name = {"name": f"{role} of {label}, stretched by tracing"}
        yield {"ph": "M", "name": "process_name", "pid": place, "args": name}
        yield {"ph": "M", "name": "process_sort_index", "pid": place, "args": {"sort_index": place}}


def _event(one: Activity) -> dict[str, object]:
    return {
        "ph": "X",
        "name": short_name(one.name) if one.kind == KERNEL else one.name,
        "cat": one.kind,
        "pid": _ROLES.index(one.role),
        "tid": one.stream,
        "ts": one.start_ns / _NS_PER_US,
        "dur": one.duration_ns / _NS_PER_US,
        "args": {"name": one.name},
    }
