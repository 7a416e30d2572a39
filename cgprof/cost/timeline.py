"""Replays seen by the device: which activity ran when, so that overlap is seen and not inferred.

Tracing slows this launch and every later one of the process: run it after everything else.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

from torch.profiler import ProfilerActivity

from cgprof.cost.replay_cost import patient, ready_graph
from cgprof.graphs.chosen import choose_keys
from cgprof.graphs.cuda import gc_paused
from cgprof.graphs.node_names import demangled
from cgprof.graphs.topology import KERNEL, PEER_COPY, Node, communicates
from cgprof.measure.torch_trace import torch_trace
from cgprof.record.contents import Counts, GraphContents
from cgprof.record.graph import GraphRecord
from cgprof.record.overlap import TracedReplay
from cgprof.record.timeline import Activity, Role, TimelineTable
from cgprof.shapes import GraphKey, RuntimeMode
from cgprof.stats.intervals import common, covered

if TYPE_CHECKING:
    from cgprof.engine.worker import Engine

MOST_PAIRS = 4
_MEMCPY, _MEMSET = "memcpy", "memset"
# Source: categories of device activities in the traces of torch's profiler (Kineto), and the
# names it gives to copies: "Memcpy PtoP (Device -> Device)" goes to another device.
_KINDS = {"kernel": KERNEL, "gpu_memcpy": _MEMCPY, "gpu_memset": _MEMSET}
_TO_PEER = "Memcpy PtoP"
_MANGLED = "_Z"
# The driver copies and fills little by kernels of its own, which CUPTI calls kernels.
# Source: names seen in replays of graphs of memcpy nodes, driver 580.
_BY_KERNEL = re.compile(r"(memcpy|memset)\d+(_\w+)?")
_ON_DEVICE = (KERNEL, _MEMCPY, PEER_COPY, _MEMSET)  # kinds of nodes that are activities
_NOTHING_SEEN = "the profiler saw nothing on the device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timelines:
    """One replay of each chosen key, by label; `notes` say what is missing or does not agree."""

    table: TimelineTable | None = None
    replays: dict[str, TracedReplay] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def trace_replays(
    engine: Engine, records: Iterable[GraphRecord], contents: Mapping[str, GraphContents]
) -> Timelines:
    """Returns one replay each of some twins and their plain keys; nothing without a twin.

    Ranks call it together; each sees its own device.

    Raises:
        ReplayError: A key cannot be replayed.
    """
    keys = choose_pairs(record.key for record in records if record.failure is None)
    if engine.recorder.kind != "cuda" or not keys:
        return Timelines()
    loopback = engine.ranks is None and engine.microbatches is not None
    seen: dict[str, list[Activity] | str] = {}
    for key in keys:
        with patient(engine, key), gc_paused():
            write = _trace_two(engine, key)
        try:
            seen[str(key)] = second_replay(activities(exported(write), loopback=loopback))
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            seen[str(key)] = f"its trace could not be read ({type(error).__name__}: {error})"
    return timelines_of(seen, contents)


def timelines_of(
    seen: Mapping[str, list[Activity] | str], contents: Mapping[str, GraphContents]
) -> Timelines:
    """Returns what was seen of each key, by label, beside the nodes of its graph."""
    found = {label: one for label, one in seen.items() if not isinstance(one, str)}
    missing: dict[str, list[str]] = {}
    for label, reason in seen.items():
        if isinstance(reason, str):
            missing.setdefault(reason, []).append(label)
    notes = [f"no timeline of {', '.join(labels)}: {why}" for why, labels in missing.items()]
    for label, one in found.items():
        notes += disagreements(label, one, contents.get(label))
    return Timelines(
        table=TimelineTable(found) if found else None,
        replays={label: summed(one, contents.get(label)) for label, one in found.items()},
        notes=tuple(notes),
    )


def choose_pairs(keys: Iterable[GraphKey], most: int = MOST_PAIRS) -> tuple[GraphKey, ...]:
    """Returns few twins, each behind the plain key of its size, by falling size.

    Twins of power-of-two sizes if there are any; of too many, the ends and what lies between.
    Others than full graphs are left out: they also run work that is no node.
    """
    known = [key for key in keys if key.mode is RuntimeMode.FULL]
    plain = {key: key.plain_among(known) for key in known if key.is_twin}
    twins = [key for key, found in plain.items() if found is not None]
    even = [key for key in twins if key.num_tokens.bit_count() == 1]
    chosen = choose_keys(even or twins, most)
    ordered = sorted(chosen, key=lambda key: (-key.num_tokens, key.num_microbatches))
    pairs = [(plain[key], key) for key in ordered]
    return tuple(dict.fromkeys(key for pair in pairs for key in pair if key is not None))


def activities(events: Iterable[Mapping[str, object]], *, loopback: bool) -> list[Activity]:
    """Returns the device's activities among the events of a trace, by start.

    An activity communicates if a node of its kind and name does. A `loopback` is one device's
    stand-in for the exchange: there every copy on the device is one of its transfers, since
    nothing else in a graph copies; the stream cannot tell them, a replay chooses its own.
    """
    found = [
        _activity(event, str(event.get("name")), _KINDS[str(event["cat"])], loopback)
        for event in events
        if event.get("cat") in _KINDS
    ]
    return sorted(found, key=lambda one: (one.start_ns, one.stream))


def second_replay(found: Sequence[Activity]) -> list[Activity] | str:
    """Returns the second of two replays of a graph, from its start on; or why it is not known.

    The first one ended before the second began.
    """
    if not found:
        return _NOTHING_SEEN
    half = len(found) // 2
    first, second = found[:half], found[half:]
    counts = [dict(Counter(one.kind for one in some)) for some in (first, second)]
    if counts[0] != counts[1] or _end_ns(first) > second[0].start_ns:
        seen = f"{_worded(counts[0])}, then {_worded(counts[1])}"
        return f"two replays under the profiler cannot be told apart: {seen}"
    begin_ns = second[0].start_ns
    return [one._replace(start_ns=one.start_ns - begin_ns) for one in second]


def summed(found: Sequence[Activity], inside: GraphContents | None) -> TracedReplay:
    """Returns what a replay spent its time on; overlapping activities count once."""
    communication = [_interval(one) for one in found if one.role == "communication"]
    compute = [_interval(one) for one in found if one.role == "compute"]
    begin_ns = min((one.start_ns for one in found), default=0)
    span_ns = _end_ns(found) - begin_ns
    return TracedReplay(
        activities=len(found),
        nodes=None if inside is None else sum(_on_device(inside.kinds).values()),
        agrees=None if inside is None else not disagreements("", found, inside),
        transfers=len(communication),
        streams=len({one.stream for one in found}),
        span_ns=span_ns,
        compute_ns=covered(compute),
        communication_ns=covered(communication),
        both_ns=covered(common(compute, communication)),
        neither_ns=span_ns - covered([*compute, *communication]),
    )


def disagreements(
    label: str, found: Sequence[Activity], inside: GraphContents | None
) -> tuple[str, ...]:
    """Returns a note where the activities are not the nodes of the graph, by kind; else nothing."""
    if inside is None:
        return (f"the nodes of {label} were not read: its timeline is not compared with them",)
    seen, expected = dict(Counter(one.kind for one in found)), _on_device(inside.kinds)
    if seen == expected:
        return ()
    return (
        f"the traced replay of {label} does not agree with its graph: {_worded(seen)} seen, "
        f"{_worded(expected)} in the graph",
    )


def _trace_two(engine: Engine, key: GraphKey) -> Callable[[str], object]:
    """What writes the trace of two replays, one after the other.

    The first is the graph's first launch under the profiler, and lets ranks begin the second
    one together.
    """
    graph = ready_graph(engine, key)
    engine.synchronize()
    with torch_trace([ProfilerActivity.CUDA]) as trace:
        for _ in range(2):
            engine.graphs.replay(graph)
            engine.synchronize()
    write: Callable[[str], object] = trace.export_chrome_trace
    return write


def exported(write: Callable[[str], object]) -> list[Mapping[str, object]]:
    """Returns the events of a trace that is written as a file; no digit of a time is lost."""
    with tempfile.TemporaryDirectory(prefix="cgprof-trace-") as folder:
        path = Path(folder) / "trace.json"
        write(str(path))
        whole = json.loads(path.read_text(errors="replace"), parse_float=Decimal)
    events: list[Mapping[str, object]] = whole["traceEvents"]
    return events


def _activity(event: Mapping[str, object], name: str, kind: str, loopback: bool) -> Activity:
    by_kernel = _BY_KERNEL.fullmatch(name) if kind == KERNEL else None
    if by_kernel is not None:
        kind = by_kernel[1]
    elif kind == _MEMCPY and name.startswith(_TO_PEER):
        kind = PEER_COPY
    # The profiler leaves very long names as the compiler made them.
    name = demangled(name) if name.startswith(_MANGLED) else name
    transfers = communicates(Node(kind, name, ())) or (loopback and kind == _MEMCPY)
    role: Role = "communication" if transfers else "compute"
    details = event.get("args")
    stream = details.get("stream", 0) if isinstance(details, Mapping) else 0
    return Activity(
        name=name,
        kind=kind,
        role=role,
        stream=int(str(stream)),
        start_ns=_ns(event["ts"]),
        duration_ns=_ns(event["dur"]),
    )


def _ns(microseconds: object) -> int:
    return round(1000 * Decimal(str(microseconds)))


def _interval(one: Activity) -> tuple[int, int]:
    return one.start_ns, one.start_ns + one.duration_ns


def _end_ns(found: Iterable[Activity]) -> int:
    return max((one.start_ns + one.duration_ns for one in found), default=0)


def _on_device(kinds: Counts) -> dict[str, int]:
    return {kind: kinds[kind] for kind in _ON_DEVICE if kinds.get(kind)}


def _worded(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) or "nothing"
