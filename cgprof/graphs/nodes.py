"""What torch does not offer on raw graphs and captured streams, through cuda-bindings.

cuda-bindings is imported inside the functions; every call's return code is checked.
"""

from __future__ import annotations

from collections import Counter
from enum import IntEnum
from typing import TYPE_CHECKING, SupportsInt

from cgprof.errors import DeviceError
from cgprof.graphs.node_names import demangled
from cgprof.graphs.topology import CHILD, KERNEL, PEER_COPY, Node, RawGraph, RawNode, flatten

if TYPE_CHECKING:
    from types import ModuleType

_COPY = "memcpy"
_KINDS = {
    "Kernel": KERNEL,
    "Memcpy": _COPY,
    "Memset": "memset",
    "Host": "host",
    "Graph": CHILD,
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
_GET_EDGES = "cudaGraphGetEdges"


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
        for node in _raw_nodes(runtime, pending.pop()):
            kind = _kind(runtime, node)
            counts[kind] += 1
            if kind == CHILD:
                pending.append(_child(runtime, node))
    return dict(counts)


def read_nodes(raw_graph: int) -> tuple[Node, ...]:
    """Returns the nodes of a cudaGraph_t in order, each child graph in place of its node.

    Kernels have their names; a copy between two devices is a "peer-copy".

    Raises:
        DeviceError: cuda-bindings is missing, or a call failed.
    """
    return flatten(_Walk().graph(raw_graph))


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


class _Walk:
    """Reads graphs with the driver's help."""

    def __init__(self) -> None:
        self._runtime = bindings()
        from cuda.bindings import driver

        self._driver: ModuleType = driver
        self._names: dict[int, str] = {}

    def graph(self, raw_graph: object) -> RawGraph:
        """Returns a graph and the graphs of its child nodes."""
        raw_nodes = _raw_nodes(self._runtime, raw_graph)
        index = {int(node): number for number, node in enumerate(raw_nodes)}
        edges = [
            (index[source], index[target]) for source, target in _edges(self._runtime, raw_graph)
        ]
        return RawGraph([self._node(node) for node in raw_nodes], edges)

    def _node(self, node: SupportsInt) -> RawNode:
        kind = _kind(self._runtime, node)
        if kind == KERNEL:
            return RawNode(kind, self._kernel_name(node))
        if kind == CHILD:
            return RawNode(kind, inner=self.graph(_child(self._runtime, node)))
        return RawNode(PEER_COPY if kind == _COPY and self._is_peer_copy(node) else kind)

    def _kernel_name(self, node: object) -> str:
        error, params = self._driver.cuGraphKernelNodeGetParams(node)
        _check("cuGraphKernelNodeGetParams", error)
        # A kernel of a library that was not loaded through a module has no function.
        call = "cuFuncGetName" if int(params.func) else "cuKernelGetName"
        handle = params.func if int(params.func) else params.kern
        if int(handle) not in self._names:
            error, name = getattr(self._driver, call)(handle)
            _check(call, error)
            self._names[int(handle)] = demangled(name.decode(errors="replace"))
        return self._names[int(handle)]

    def _is_peer_copy(self, node: object) -> bool:
        error, params = self._driver.cuGraphMemcpyNodeGetParams(node)
        _check("cuGraphMemcpyNodeGetParams", error)
        devices = {
            self._device(params.srcMemoryType, params.srcDevice, params.srcHost),
            self._device(params.dstMemoryType, params.dstDevice, params.dstHost),
        }
        return None not in devices and len(devices) == 2

    def _device(self, memory_type: object, unified: SupportsInt, host: SupportsInt) -> int | None:
        """The device whose memory one end of a copy is in; None for the host's and for arrays.

        The runtime is asked: the driver's CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL reads 0 for every
        device in some releases of cuda-bindings 13.

        Source: NVIDIA/cuda-python issue 2928.
        """
        types = self._driver.CUmemorytype
        if memory_type not in (types.CU_MEMORYTYPE_DEVICE, types.CU_MEMORYTYPE_UNIFIED):
            return None
        address = int(unified) or int(host)
        if not address:
            return None
        error, found = self._runtime.cudaPointerGetAttributes(address)
        # An error: memory that the driver did not give out.
        if error or int(found.type) != int(self._runtime.cudaMemoryType.cudaMemoryTypeDevice):
            return None
        return int(found.device)


def _raw_nodes(runtime: ModuleType, graph: object) -> list[SupportsInt]:
    error, _, count = runtime.cudaGraphGetNodes(graph, 0)
    _check("cudaGraphGetNodes", error)
    if not count:
        return []
    error, nodes, count = runtime.cudaGraphGetNodes(graph, count)
    _check("cudaGraphGetNodes", error)
    return list(nodes[:count])


def _edges(runtime: ModuleType, graph: object) -> list[tuple[int, int]]:
    """Pairs of node handles. The edges' own data, which older bindings do not give, is not read."""
    # Bindings before 13 refuse edges with data in the call without "_v2".
    call = "cudaGraphGetEdges_v2" if hasattr(runtime, "cudaGraphGetEdges_v2") else _GET_EDGES
    get_edges = getattr(runtime, call)
    error, *_, count = get_edges(graph, 0)
    _check(call, error)
    if not count:
        return []
    error, sources, targets, *_, count = get_edges(graph, count)
    _check(call, error)
    pairs = zip(sources[:count], targets[:count], strict=True)
    return [(int(source), int(target)) for source, target in pairs]


def _kind(runtime: ModuleType, node: object) -> str:
    error, node_type = runtime.cudaGraphNodeGetType(node)
    _check("cudaGraphNodeGetType", error)
    bare: str = node_type.name.removeprefix(_TYPE_PREFIX)
    return _KINDS.get(bare, bare.lower())


def _child(runtime: ModuleType, node: object) -> object:
    error, graph = runtime.cudaGraphChildGraphNodeGetGraph(node)
    _check("cudaGraphChildGraphNodeGetGraph", error)
    found: object = graph
    return found


def _check(call: str, error: IntEnum) -> None:
    if error:
        raise DeviceError(f"{call} failed: {error.name} [{int(error)}]")
