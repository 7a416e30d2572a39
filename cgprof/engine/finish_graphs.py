"""The finish of a greedy decode step as graphs: logits and tokens in one launch.

The operators that one launch replaces touch so much code and memory that the host's other stages
get dearer with them, the launch of the next step's own graph among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from cgprof.engine.room import device_memory, give_back_unused, ran_out
from cgprof.engine.sampler import greedy
from cgprof.errors import CgprofError, DeviceError
from cgprof.graphs.recorder import Recorder, Recording
from cgprof.models.decoder import Decoder


class FinishGraphs:
    """One graph a padded number of requests; none before `capture`.

    They read the first rows of the engine's output [T, D]: a request's row is its place in the
    batch. `device_bytes` is by how much free memory shrank meanwhile; None without a device, and
    where another process gave memory back.
    """

    def __init__(self, model: Decoder, output: torch.Tensor) -> None:
        self._model = model
        self._output = output
        self._graphs: dict[int, tuple[Recording, torch.Tensor]] = {}
        self.device_bytes: int | None = None

    def capture(self, recorder: Recorder, counts: Iterable[int]) -> None:
        """Captures one graph for each padded number of requests, at least one, the largest first.

        `recorder` records nothing else, so that what a key's graph takes is read without them.

        Raises:
            DeviceError: Memory ran out, or the driver refuses a recording.
        """
        largest_first = sorted(set(counts), reverse=True)
        device = self._output.device
        # All share it: a step's tokens are copied before the next step begins.
        tokens = torch.zeros(largest_first[0], dtype=torch.int64, device=device)
        count = largest_first[0]
        try:
            for count in largest_first if self._output.is_cuda else ():
                recorder.warm_up(self._work(tokens[:count]))
            give_back_unused(device)  # the captures allocate their logits again
            before, _ = device_memory(device)
            for count in largest_first:
                recording = recorder.record(self._work(tokens[:count]))
                recording.instantiate()
                self._graphs[count] = recording, tokens[:count]
        except (CgprofError, RuntimeError) as error:
            way_out = "leave such graphs out by --set capture.finish_graphs=false"
            if ran_out(error) is not None:
                # Without the graphs the same logits are made operator by operator.
                way_out = "lower --max-num-seqs or --gpu-memory-utilization"
            elif not isinstance(error, CgprofError):
                raise
            free, _ = device_memory(device)
            problem = " ".join(str(error).split()) or type(error).__name__
            raise DeviceError(
                f"the graph of logits and tokens of {count} requests, {free} bytes free: "
                f"{problem}; {way_out}"
            ) from error
        grown = before - device_memory(device)[0]
        if self._output.is_cuda and grown >= 0:
            self.device_bytes = grown

    def replay(self, num_reqs: int) -> torch.Tensor | None:
        """Enqueues the tokens [num_reqs] i64 of the hidden states in the output and returns them.

        None, with nothing enqueued, where no graph has that many requests.
        """
        found = self._graphs.get(num_reqs)
        if found is None:
            return None
        recording, tokens = found
        recording.replay()
        return tokens

    def free(self) -> None:
        """Frees all of them."""
        for recording, _ in self._graphs.values():
            recording.free()
        self._graphs.clear()

    def _work(self, tokens: torch.Tensor) -> Callable[[], None]:
        def choose() -> None:
            greedy(self._model.scores(self._output[: tokens.shape[0]]), out=tokens)

        return choose
