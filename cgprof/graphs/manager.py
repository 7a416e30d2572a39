"""GraphManager: captures a key, replays a key, frees it. The loop over a plan is elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields

import torch

from cgprof.batch.buffers import DeviceFields, InputBuffers
from cgprof.errors import CaptureError, CgprofError, ReplayError
from cgprof.graphs.guard import check_addresses, check_nodes
from cgprof.graphs.recorder import Recorder, Recording
from cgprof.shapes import BatchShape, GraphKey

Forward = Callable[[], None]


@dataclass(slots=True, kw_only=True)
class CapturedGraph:
    """A key that can be replayed; owned by `GraphManager`."""

    key: GraphKey
    recording: Recording
    outputs: torch.Tensor  # [T, D] the rows of the shared output that the graph writes
    input_addresses: tuple[int, ...]
    capture_ns: int  # both preparations, warm-up and recording
    instantiate_ns: int  # upload included
    replays: int = 0
    poisoned: bool = False


class GraphManager:
    """Owns the graphs of one engine.

    Args:
        recorder: Records and replays.
        buffers: The inputs; their addresses are checked at every replay.
        output: [T, D], allocated before the first capture; every graph writes its first rows.
        extra_addresses: By name, how to read the address of anything else a graph uses.
        on_failure: Called when a capture fails, before its error is raised.
    """

    def __init__(
        self,
        recorder: Recorder,
        buffers: InputBuffers,
        output: torch.Tensor,
        *,
        extra_addresses: Mapping[str, Callable[[], int]] | None = None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        extra = dict(extra_addresses or {})
        self._recorder = recorder
        self._buffers = buffers
        self._output = output
        self._extra = tuple(extra.values())
        self._on_failure = on_failure
        self._names = (*(field.name for field in fields(DeviceFields)), "output", *extra)
        self._graphs: dict[GraphKey, CapturedGraph] = {}
        self._keys: tuple[GraphKey, ...] = ()

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """The captured keys, in order of capture; the same object until the set changes."""
        return self._keys

    @property
    def captured(self) -> Mapping[GraphKey, CapturedGraph]:
        """What is known of each captured key; a live view, not to be written."""
        return self._graphs

    def capture(
        self,
        key: GraphKey,
        make_forward: Callable[[], Forward],
        *,
        mark: Callable[[str], None] = lambda phase: None,
    ) -> CapturedGraph:
        """Warms up and captures one key; `make_forward` prepares outside the graph, once for each.

        `mark` is called after each phase, "warmed", "recorded" and "instantiated", off the clock.

        Raises:
            CaptureError: Captured before, or something went wrong; the cause is chained.
        """
        if key in self._graphs:
            raise CaptureError(str(key), "it is captured already; drop it first")
        if key.num_tokens > self._output.shape[0]:
            raise CaptureError(
                str(key), f"the output buffer has only {self._output.shape[0]} token rows"
            )
        with ExitStack() as undo:
            undo.callback(self._on_failure)
            try:
                graph = self._capture(key, make_forward, mark, undo)
            except CaptureError:
                raise
            except Exception as error:
                problem = str(error) if isinstance(error, CgprofError) else _describe(error)
                raise CaptureError(str(key), problem) from error
            undo.pop_all()
        self._graphs[key] = graph
        self._keys = tuple(self._graphs)
        return graph

    def poison(self, key: GraphKey) -> None:
        """Fills a key's output rows with NaN, so that a replay that writes nothing shows.

        Raises:
            ReplayError: The key was not captured.
        """
        graph = self._graph(key)
        graph.outputs.fill_(float("nan"))
        graph.poisoned = True

    def ready(self, key: GraphKey, shape: BatchShape) -> CapturedGraph:
        """Returns a key's graph once all is checked that a replay for this batch relies on.

        Before the first replay of a key its rows are poisoned, unless `poison` has done so.

        Raises:
            ReplayError: Not captured, the shape is outside the key, or an address moved.
        """
        graph = self._graphs.get(key)
        if graph is None or not key.covers(shape) or self._addresses() != graph.input_addresses:
            raise self._refusal(key, shape)
        if not graph.poisoned:
            self.poison(key)
        return graph

    def replay(self, graph: CapturedGraph) -> torch.Tensor:
        """Enqueues a graph that is `ready` for the batch in the buffers; its output rows [T, D].

        Nothing is checked here: between an idle device and its work every instruction counts.
        """
        graph.recording.replay()
        graph.replays += 1
        return graph.outputs

    def drop(self, key: GraphKey) -> None:
        """Frees one key.

        Raises:
            ReplayError: The key was not captured.
        """
        self._graph(key).recording.free()
        del self._graphs[key]
        self._keys = tuple(self._graphs)

    def free(self) -> None:
        """Frees all keys."""
        for key in self.keys:
            self.drop(key)

    def _refusal(self, key: GraphKey, shape: BatchShape) -> ReplayError:
        try:
            graph = self._graph(key)
            check_addresses(key, self._addresses(), graph.input_addresses, self._names)
        except ReplayError as error:
            return error
        return ReplayError(str(key), f"the batch is outside the key: {shape}")

    def _graph(self, key: GraphKey) -> CapturedGraph:
        graph = self._graphs.get(key)
        if graph is None:
            raise ReplayError(str(key), f"it is not among the {len(self._graphs)} captured keys")
        return graph

    def _capture(
        self,
        key: GraphKey,
        make_forward: Callable[[], Forward],
        mark: Callable[[str], None],
        undo: ExitStack,
    ) -> CapturedGraph:
        start = time.perf_counter_ns()
        self._recorder.warm_up(make_forward())
        capture_ns = time.perf_counter_ns() - start
        mark("warmed")
        start = time.perf_counter_ns()
        recording = self._recorder.record(make_forward())
        capture_ns += time.perf_counter_ns() - start
        undo.callback(recording.free)
        mark("recorded")
        check_nodes(key, recording.nodes, {k: g.recording.nodes for k, g in self._graphs.items()})
        start = time.perf_counter_ns()
        recording.instantiate()
        instantiate_ns = time.perf_counter_ns() - start
        mark("instantiated")
        return CapturedGraph(
            key=key,
            recording=recording,
            outputs=self._output[: key.num_tokens],
            input_addresses=self._addresses(),
            capture_ns=capture_ns,
            instantiate_ns=instantiate_ns,
        )

    def _addresses(self) -> tuple[int, ...]:
        extra = [read() for read in self._extra]
        return (*self._buffers.addresses(), self._output.data_ptr(), *extra)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
