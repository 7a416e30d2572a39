"""The work that one eager step enqueues in its launch: what a graph of its key would hold.

Kernels have the names that graphs give them; copies and memsets are counted as kinds.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch.profiler import ProfilerActivity

from cgprof.graphs.node_names import demangled
from cgprof.graphs.topology import KERNEL
from cgprof.measure.torch_trace import torch_trace
from cgprof.record.contents import Counts
from cgprof.shapes import GraphKey

if TYPE_CHECKING:
    from cgprof.engine.worker import Engine

MEMCPY, MEMSET = "memcpy", "memset"
# Source: categories of device activities in the traces of torch's profiler (Kineto).
_KERNEL = "kernel"
_KINDS = {"gpu_memcpy": MEMCPY, "gpu_memset": MEMSET}
_MANGLED = "_Z"


def eager_step_work(engine: Engine, key: GraphKey) -> Counts | str:
    """Returns the work of one eager step at the key's padding and split, or why it is not known.

    A step of a twin runs split, by the same microbatches. On a device two traces of it must
    agree; on the CPU a tape names its operators, as it does for a graph.

    Raises:
        CgprofError: The step is refused, or a microbatch raised.
    """
    step = engine.live_step(key)
    prepared = engine.runner.prepare(step, engine.decision_for(key.as_eager()))

    def launch() -> None:
        engine.runner.launch(prepared, count=False)

    if engine.recorder.kind == "tape":
        recording = engine.recorder.record(launch)
        nodes = recording.read_nodes()
        recording.free()
        return dict(Counter(node.name if node.kind == KERNEL else node.kind for node in nodes))
    launch()  # loads what the first step of a kind loads
    first, second = (trace(launch, engine.synchronize) for _ in range(2))
    if first != second:
        return f"two traces of the same step differ: {_unlike(first, second)}"
    if not first:
        return "the profiler saw no work on the device"
    return first


def trace(launch: Callable[[], None], wait: Callable[[], None]) -> Counts:
    """Returns what a launch runs on the device; nothing else runs there meanwhile."""
    wait()
    with torch_trace([ProfilerActivity.CUDA]) as traced:
        launch()
        wait()
    with tempfile.TemporaryDirectory(prefix="cgprof-trace-") as folder:
        path = Path(folder) / "trace.json"
        traced.export_chrome_trace(str(path))
        found = json.loads(path.read_text(errors="replace"))
    return count_work(found["traceEvents"])


def count_work(events: Sequence[Mapping[str, object]]) -> Counts:
    """Returns the device's activities among the events of a trace, kernels by name."""
    found: Counter[str] = Counter()
    for event in events:
        category, name = event.get("cat"), str(event.get("name"))
        if category == _KERNEL:
            # The profiler leaves very long names as the compiler made them.
            found[demangled(name) if name.startswith(_MANGLED) else name] += 1
        elif category in _KINDS:
            found[_KINDS[str(category)]] += 1
    return dict(found)


def _unlike(first: Counts, second: Counts) -> str:
    names = sorted(
        name for name in first.keys() | second.keys() if first.get(name) != second.get(name)
    )
    told = [f"{name} {first.get(name, 0)} and {second.get(name, 0)} times" for name in names[:3]]
    return ", ".join(told) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
