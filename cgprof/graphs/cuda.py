"""CudaRecorder: CUDA graphs in one pool, captured on the compute stream that the engine made.

Whatever goes wrong while recording, the stream's capture is ended, the allocators stop routing to
the pool, and stream, garbage collector and random generator are as before.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal

import torch

from cgprof.errors import MicrobatchError, RecordingError
from cgprof.graphs import nodes
from cgprof.graphs.topology import Node

# Other threads may allocate, copy and query while this one records. Source: CUDA runtime API,
# cudaStreamCaptureMode.
_CAPTURE_MODE = "thread_local"

# Code, the driver's words (cudaGetErrorString), and ours. Source: CUDA runtime API, cudaError_t.
_CAPTURE_FAULTS = (
    (
        900,
        "operation not permitted when stream is capturing",
        "host sync while capturing: an operation waited for the device, such as .item(), "
        "or took memory on a stream outside the recording",
    ),
    (
        901,
        "operation failed due to a previous error during capture",
        "an earlier operation had already made the recording invalid",
    ),
    (
        902,
        "operation would result in a merge of separate capture sequences",
        "an event joined two separate recordings",
    ),
    (
        903,
        "capture was not ended in the same stream as it began",
        "the recording ended on another stream than it began on",
    ),
    (
        904,
        "capturing stream has unjoined work",
        "side stream not joined: the compute stream never waited for work that forked from it",
    ),
    (
        905,
        "dependency created on uncaptured work in another stream",
        "the recording waited for work that was enqueued outside of it",
    ),
    (
        906,
        "operation would make the legacy stream depend on a capturing blocking stream",
        "work went to the legacy default stream",
    ),
    (
        907,
        "operation not permitted on an event last recorded in a capturing stream",
        "an event of the recording was queried or waited for by the host",
    ),
    (
        908,
        "attempt to terminate a thread-local capture sequence from another thread",
        "another thread tried to end the recording",
    ),
)


class CudaRecording:
    """One captured graph."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool_bytes: int
    ) -> None:
        self._graph = graph
        self._stream = stream
        self.pool_bytes = pool_bytes
        self.nodes: Mapping[str, int] = nodes.count_nodes(graph.raw_cuda_graph())

    @property
    def num_nodes(self) -> int:
        """All nodes."""
        return sum(self.nodes.values())

    def instantiate(self) -> None:
        """Instantiates the graph, uploads it, and waits for that."""
        self._graph.instantiate()
        nodes.upload(self._graph.raw_cuda_graph_exec(), self._stream.cuda_stream)
        self._stream.synchronize()

    def replay(self) -> None:
        """Launches the graph on the current stream."""
        self._graph.replay()

    def read_nodes(self) -> tuple[Node, ...]:
        """Reads every node of the graph, kernels with their names.

        Raises:
            DeviceError: A call failed.
        """
        return nodes.read_nodes(self._graph.raw_cuda_graph())

    def free(self) -> None:
        """Destroys the graph; its memory goes back to the pool."""
        self._graph.reset()


class CudaRecorder:
    """Records on `compute_stream`; `extra_streams` are named in accounts of the pool's memory.

    Raises:
        DeviceError: cuda-bindings is missing.
    """

    kind: Literal["cuda"] = "cuda"
    capture_error_mode: str | None = _CAPTURE_MODE

    def __init__(
        self,
        compute_stream: torch.cuda.Stream,
        extra_streams: Sequence[torch.cuda.Stream] = (),
    ) -> None:
        nodes.bindings()
        self._compute = compute_stream
        self._names = {compute_stream.cuda_stream: "compute"}
        for index, stream in enumerate(extra_streams):
            self._names[stream.cuda_stream] = f"side-{index}"
        self._pool = torch.cuda.graph_pool_handle()
        self._warm_matmuls()
        # The allocator forgets a pool that no graph uses and asserts when it comes back; an empty
        # graph that is kept holds it through failures and `free`.
        self._keeper = torch.cuda.CUDAGraph(keep_graph=True)
        self._capture(self._keeper, lambda: None)

    def warm_up(self, work: Callable[[], None]) -> None:
        """Runs `work` on the compute stream and waits for the device."""
        with torch.cuda.stream(self._compute):
            work()
        torch.cuda.synchronize(self._compute.device)

    def record(self, work: Callable[[], None]) -> CudaRecording:
        """Captures `work`, which must leave no side stream unjoined.

        Raises:
            RecordingError: The driver refused; the message says why in plain words.
            MicrobatchError: The same inside a microbatch.
        """
        before = sum(self.pool_by_stream().values())
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        try:
            self._capture(graph, work)
        except MicrobatchError as error:
            fault = _plain_words(error.problem)
            if fault is None:
                raise
            raise MicrobatchError(error.index, fault) from error.__cause__
        except RuntimeError as error:
            fault = _plain_words(str(error))
            if fault is None:
                raise
            raise RecordingError(fault) from error
        growth = sum(self.pool_by_stream().values()) - before
        return CudaRecording(graph, self._compute, growth)

    @contextmanager
    def enter(self, index: int) -> Iterator[None]:
        """Makes the compute stream and its device current in a microbatch thread."""
        with (
            torch.inference_mode(),
            torch.cuda.device(self._compute.device),
            torch.cuda.stream(self._compute),
        ):
            yield

    def pool_by_stream(self) -> dict[str, int]:
        """Returns the pool's reserved bytes by the stream that they were reserved for."""
        totals: dict[str, int] = {}
        for segment in torch.cuda.memory_snapshot():
            if tuple(segment["segment_pool_id"]) == tuple(self._pool):
                handle = segment["stream"]
                name = self._names.get(handle, f"stream-{handle:#x}")
                totals[name] = totals.get(name, 0) + segment["total_size"]
        return totals

    def _warm_matmuls(self) -> None:
        # cuBLAS allocates a workspace for each stream at its first matmul: not in the pool.
        def multiply() -> None:
            for dtype in (torch.float32, torch.bfloat16):
                square = torch.zeros(64, 64, dtype=dtype, device=self._compute.device)
                torch.addmm(square[0], square, square)

        self.warm_up(multiply)

    def _capture(self, graph: torch.cuda.CUDAGraph, work: Callable[[], None]) -> None:
        from cgprof.graphs.first_run_triton import first_runs_refused

        with gc_paused(), first_runs_refused(), torch.cuda.stream(self._compute):
            if torch.cuda.is_current_stream_capturing():
                raise RecordingError("another recording is on; one at a time")
            torch.cuda.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode=_CAPTURE_MODE)
            with ExitStack() as undo:
                undo.callback(self._abandon, graph)
                work()
                self._end(graph)
                undo.pop_all()

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Undoes all that `capture_begin` did, by letting torch end an empty capture."""
        nodes.replace_capture(self._compute.cuda_stream)
        self._end(graph)
        graph.reset()

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        # `work` may have left another stream current, also when it raised.
        torch.cuda.set_stream(self._compute)
        with warnings.catch_warnings():
            # An empty graph is for `graphs.guard` to refuse.
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            graph.capture_end()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Keeps the garbage collector out of a capture or a measurement; leaves it as it was."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _plain_words(message: str) -> str | None:
    for code, driver_words, words in _CAPTURE_FAULTS:
        if driver_words in message:
            return f"{words} [CUDA error {code}: {driver_words}]"
    return None
