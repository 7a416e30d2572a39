"""Captures graphs with known nodes, one after another, and frees them together. CUDA only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, SupportsInt

import torch

from cgprof.cost.synthetic_layout import Spec, node_order
from cgprof.errors import DeviceError, RecordingError
from cgprof.graphs.cuda import CudaRecorder, CudaRecording
from cgprof.graphs.nodes import bindings
from cgprof.graphs.topology import contents
from cgprof.record.cost import NodeKind

_ROW, _COPY_BYTES = 256, 4096


_ONE_PEER_COPY = Spec(kind="peer-copy", counts={"kernel": 1, "peer-copy": 1})


class _Peer(NamedTuple):
    """Memory here and on another device that can be reached."""

    other: int
    address: int
    other_address: int


class GraphBuilder:
    """Captures graphs on one stream, branches on a side stream; `close` frees all of them."""

    def __init__(self, compute: torch.cuda.Stream) -> None:
        self._undo = ExitStack()
        self._compute = compute
        self._side = torch.cuda.Stream(compute.device)
        self._recorder = CudaRecorder(compute, (self._side,))
        rows = torch.zeros(3, _ROW, device=compute.device)
        self._row, self._side_row, self._row_outside = rows[0], rows[1], rows[2]
        self._bytes = torch.zeros(2, _COPY_BYTES, dtype=torch.uint8, device=compute.device)
        self._record_event = self._event()
        self._wait_event = self._event()
        self._peer: _Peer | None = None
        self.notes: list[str] = []

    @property
    def has_peer(self) -> bool:
        """Whether copies to another device can be captured."""
        return self._peer is not None

    def open(self) -> None:
        """Looks for a peer and makes every call once outside a capture.

        Raises:
            DeviceError: A call failed.
        """
        _call("cudaEventRecord", self._wait_event, self._compute.cuda_stream)
        outside: tuple[NodeKind, ...] = ("kernel", "fork", "memset", "memcpy")
        self._recorder.warm_up(lambda: self._run(outside))
        try:
            self._open_peer()
        except (DeviceError, RecordingError) as error:
            self._peer = None
            self.notes.append(f"copies to a peer: not measured, {error}")

    def enqueue_kernel(self) -> None:
        """Enqueues one small kernel outside of any graph, as the preparation of a step does."""
        self._row_outside.add_(1)

    def build(self, spec: Spec) -> CudaRecording:
        """Returns a graph with these nodes and forks, instantiated and uploaded.

        Raises:
            DeviceError: The driver made other nodes of the calls, or a call failed.
        """
        order = node_order(spec.counts)
        recording = self._recorder.record(lambda: self._run(order))
        self._undo.callback(recording.free)
        _check_contents(recording, spec.in_graph)
        recording.instantiate()
        return recording

    def close(self) -> None:
        """Waits for the device and frees all that was made."""
        torch.cuda.synchronize(self._compute.device)
        self._undo.close()

    def _open_peer(self) -> None:
        """Looks for a peer, copies to it, and captures that once, since a driver may refuse it."""
        self._peer = _find_peer(self._compute.device, self._undo)
        if self._peer is None:
            return
        self._recorder.warm_up(self._peer_copy)
        self.build(_ONE_PEER_COPY)
        self.notes.append(
            f"copies to a peer: to device {self._peer.other}, which holds a context of this "
            "process from then on"
        )

    def _run(self, order: Sequence[NodeKind]) -> None:
        for kind in order:
            self._issue(kind)

    def _issue(self, kind: NodeKind) -> None:
        match kind:
            case "kernel":
                self._kernel()
            case "memset":
                self._memset()
            case "memcpy":
                self._copy()
            case "peer-copy":
                self._peer_copy()
            case "event-wait":
                self._wait()
            case "event-record":
                self._branch(self._record)
            case "fork":
                self._branch(self._side_kernel)

    def _branch(self, beside: Callable[[], object]) -> None:
        """Something on the side stream, a kernel on the main one, and their join."""
        self._side.wait_stream(self._compute)
        with torch.cuda.stream(self._side):
            beside()
        self._kernel()
        self._compute.wait_stream(self._side)

    def _kernel(self) -> None:
        self._row.add_(1)

    def _side_kernel(self) -> None:
        self._side_row.add_(1)

    def _memset(self) -> None:
        address = self._bytes[0].data_ptr()
        _call("cudaMemsetAsync", address, 0, _COPY_BYTES, self._compute.cuda_stream)

    def _copy(self) -> None:
        target, source = self._bytes[0].data_ptr(), self._bytes[1].data_ptr()
        kind = bindings().cudaMemcpyKind.cudaMemcpyDeviceToDevice
        _call("cudaMemcpyAsync", target, source, _COPY_BYTES, kind, self._compute.cuda_stream)

    def _peer_copy(self) -> None:
        assert self._peer is not None  # asked for only where there is one
        # The call for peers is refused in a capture; by unified addresses the driver knows as much.
        kind = bindings().cudaMemcpyKind.cudaMemcpyDefault
        target, source = self._peer.other_address, self._peer.address
        _call("cudaMemcpyAsync", target, source, _COPY_BYTES, kind, self._compute.cuda_stream)

    def _record(self) -> None:
        external = bindings().cudaEventRecordExternal
        _call("cudaEventRecordWithFlags", self._record_event, self._side.cuda_stream, external)

    def _wait(self) -> None:
        external = bindings().cudaEventWaitExternal
        _call("cudaStreamWaitEvent", self._compute.cuda_stream, self._wait_event, external)

    def _event(self) -> object:
        """An event without a time, as communication libraries use them."""
        (event,) = _call("cudaEventCreateWithFlags", bindings().cudaEventDisableTiming)
        self._undo.callback(_call, "cudaEventDestroy", event)
        return event


@contextmanager
def graph_builder(device: torch.device) -> Iterator[GraphBuilder]:
    """Gives a builder on the current stream, or on a new one in place of the default stream.

    The stream is current inside. Every graph is freed at the end.

    Raises:
        DeviceError: cuda-bindings is missing, or a call failed.
    """
    if device.type != "cuda":
        raise DeviceError(f"launching graphs is modelled on CUDA devices, found {device.type}")
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream()
        if stream == torch.cuda.default_stream():
            stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), ExitStack() as undo:
            builder = GraphBuilder(stream)
            undo.callback(builder.close)
            builder.open()
            yield builder


def _check_contents(recording: CudaRecording, counts: Mapping[NodeKind, int]) -> None:
    """Compares kinds of node, copies to a peer among the copies, and forks."""
    asked = {str(kind): count for kind, count in counts.items() if count and kind != "fork"}
    copies = asked.pop("memcpy", 0) + asked.pop("peer-copy", 0)
    if copies:
        asked["memcpy"] = copies
    found = dict(recording.nodes)
    forks, asked_forks = contents(recording.read_nodes()).forks, counts.get("fork", 0)
    if found != asked or forks != asked_forks:
        raise DeviceError(
            f"a synthetic graph should have {asked} and {asked_forks} forks, found {found} and "
            f"{forks}: this driver captures calls as other nodes, set measure.launch_model=false"
        )


def _find_peer(device: torch.device, undo: ExitStack) -> _Peer | None:
    """Memory here and on the first device that can be reached; nothing where there is none."""
    here = device.index
    others = [
        other
        for other in range(torch.cuda.device_count())
        if other != here and torch.cuda.can_device_access_peer(here, other)
    ]
    if not others:
        return None
    address = _allocated(here, here, undo)
    other_address = _allocated(others[0], here, undo)
    _reach(others[0], undo)
    return _Peer(others[0], address, other_address)


def _allocated(device: int, back_to: int, undo: ExitStack) -> int:
    _call("cudaSetDevice", device)
    try:
        (address,) = _call("cudaMalloc", _COPY_BYTES)
    finally:
        _call("cudaSetDevice", back_to)
    undo.callback(_call, "cudaFree", address)
    return int(address)


def _reach(other: int, undo: ExitStack) -> None:
    """Makes a device's memory reachable from the current one, and takes that back at the end."""
    runtime = bindings()
    (error,) = runtime.cudaDeviceEnablePeerAccess(other, 0)
    if error == runtime.cudaError_t.cudaErrorPeerAccessAlreadyEnabled:
        runtime.cudaGetLastError()
    elif error:
        raise DeviceError(f"cudaDeviceEnablePeerAccess failed: {error.name} [{int(error)}]")
    else:
        undo.callback(_call, "cudaDeviceDisablePeerAccess", other)


def _call(name: str, *arguments: object) -> tuple[SupportsInt, ...]:
    """Calls the CUDA runtime and returns what it gives besides its error."""
    error, *found = getattr(bindings(), name)(*arguments)
    if error:
        bindings().cudaGetLastError()  # forgets it, or a later call would be blamed
        raise DeviceError(f"{name} failed: {error.name} [{int(error)}]")
    return tuple(found)
