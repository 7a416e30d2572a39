"""The finish of a greedy decode step as graphs: logits and tokens in one launch.

The operators that one launch replaces touch so much code and memory that the host's other stages
get dearer with them, the launch of the next step's own graph among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from cgprof.engine.room import device_memory
from cgprof.engine.sampler import greedy
from cgprof.errors import DeviceError
from cgprof.graphs.recorder import Recorder, Recording
from cgprof.models.decoder import Decoder


class FinishGraphs:
    """One graph a padded number of requests; they read the first rows of the engine's output.

    They have a pool of their own, so that what a key's graph takes is read without them.
    `device_bytes` is what all of them took; None without a device.

    Args:
        recorder: Records them and nothing else.
        model: Gives the scores.
        output: [T, D] hidden states; a request's row is its place in the batch.
        counts: Padded numbers of requests.

    Raises:
        DeviceError: The logits of the largest do not fit.
    """

    def __init__(
        self, recorder: Recorder, model: Decoder, output: torch.Tensor, counts: Iterable[int]
    ) -> None:
        largest_first = sorted(set(counts), reverse=True)
        self._graphs: dict[int, tuple[Recording, torch.Tensor]] = {}
        self.device_bytes: int | None = None
        # All share it: a step's tokens are copied before the next step begins.
        tokens = torch.zeros(max(largest_first, default=0), dtype=torch.int64, device=output.device)

        def work(count: int) -> Callable[[], None]:
            def choose() -> None:
                greedy(model.scores(output[:count]), out=tokens[:count])

            return choose

        try:
            for count in largest_first:
                recorder.warm_up(work(count))
            before, _ = device_memory(output.device)
            for count in largest_first:
                recording = recorder.record(work(count))
                recording.instantiate()
                self._graphs[count] = recording, tokens[:count]
        except torch.OutOfMemoryError as error:
            raise DeviceError(
                f"the logits of {largest_first[0]} requests do not fit beside the KV cache; lower "
                "--max-num-seqs or --gpu-memory-utilization"
            ) from error
        if output.is_cuda:
            self.device_bytes = max(0, before - device_memory(output.device)[0])

    def tokens(self, num_reqs: int) -> torch.Tensor | None:
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
