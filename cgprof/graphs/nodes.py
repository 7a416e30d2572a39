"""What torch does not offer on raw graphs and captured streams, through cuda-bindings.

cuda-bindings is imported inside the functions; every call's return code is checked.
"""

from __future__ import annotations

from collections import Counter
from enum import IntEnum
from typing import TYPE_CHECKING

from cgprof.errors import DeviceError

if TYPE_CHECKING:
    from types import ModuleType

_KINDS = {
    "Kernel": "kernel",
    "Memcpy": "memcpy",
    "Memset": "memset",
    "Host": "host",
    "Graph": "child",
    "Empty": "empty",
    "WaitEvent": "event-wait",
    "EventRecord": "event-record",
    "ExtSemaphoreSignal": "semaphore-signal",
    "ExtSemaphoreWait": "semaphore-wait",
    "MemAlloc": "memory-alloc",
    "MemFree": "memory-free",
    "Conditional": "conditional",
    "MemcpyBatch": "memcpy-batch",
}
_TYPE_PREFIX = "cudaGraphNodeType"


def bindings() -> ModuleType:
    """Returns the runtime module of cuda-bindings.

    Raises:
        DeviceError: cuda-bindings is not installed.
    """
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise DeviceError(
            "CUDA graphs need cuda-bindings, which is not installed: pip install 'cgprof[gpu]'"
        ) from error
    module: ModuleType = runtime
    return module


def count_nodes(raw_graph: int) -> dict[str, int]:
    """Returns how many nodes of each kind a cudaGraph_t has, child graphs counted through.

    Raises:
        DeviceError: cuda-bindings is missing, or a call failed.
    """
    runtime = bindings()
    counts: Counter[str] = Counter()
    pending: list[object] = [raw_graph]
    while pending:
        graph = pending.pop()
        error, _, count = runtime.cudaGraphGetNodes(graph, 0)
        _check("cudaGraphGetNodes", error)
        if not count:
            continue
        error, nodes, count = runtime.cudaGraphGetNodes(graph, count)
        _check("cudaGraphGetNodes", error)
        for node in nodes[:count]:
            error, node_type = runtime.cudaGraphNodeGetType(node)
            _check("cudaGraphNodeGetType", error)
            bare = node_type.name.removeprefix(_TYPE_PREFIX)
            kind = _KINDS.get(bare, bare.lower())
            counts[kind] += 1
            if kind == "child":
                error, child = runtime.cudaGraphChildGraphNodeGetGraph(node)
                _check("cudaGraphChildGraphNodeGetGraph", error)
                pending.append(child)
    return dict(counts)


def upload(raw_exec: int, stream_handle: int) -> None:
    """Enqueues the upload of a cudaGraphExec_t, so that its first launch need not do it.

    Raises:
        DeviceError: cuda-bindings is missing, or the call failed.
    """
    (error,) = bindings().cudaGraphUpload(raw_exec, stream_handle)
    _check("cudaGraphUpload", error)


def replace_capture(stream_handle: int) -> None:
    """Ends the capture on a stream, in whatever state it is, and begins an empty one.

    After it, torch's own end of the capture succeeds and undoes all that its begin did.

    Raises:
        DeviceError: cuda-bindings is missing, or a capture cannot begin.
    """
    runtime = bindings()
    # Not checked: an invalidated or already ended capture answers with an error, and is ended.
    _, graph = runtime.cudaStreamEndCapture(stream_handle)
    if graph is not None and int(graph):
        (error,) = runtime.cudaGraphDestroy(graph)
        _check("cudaGraphDestroy", error)
    mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
    (error,) = runtime.cudaStreamBeginCapture(stream_handle, mode)
    _check("cudaStreamBeginCapture", error)


def _check(call: str, error: IntEnum) -> None:
    if error:
        raise DeviceError(f"{call} failed: {error.name} [{int(error)}]")
