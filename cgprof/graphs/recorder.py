"""What records a step and what replays it; `graphs.cuda` and `graphs.tape` implement both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Literal, Protocol

from cgprof.graphs.topology import Node


class Recording(Protocol):
    """One recorded step. Replays run on the compute stream, one at a time: all share one pool."""

    @property
    def nodes(self) -> Mapping[str, int]:
        """Nodes by kind; 'kernel' counts what does work (operators, on a tape)."""

    @property
    def num_nodes(self) -> int:
        """All nodes."""

    @property
    def pool_bytes(self) -> int:
        """What this recording added to the pool, by the recorder's own accounting."""

    def instantiate(self) -> None:
        """Makes the recording ready to replay and uploads it; called once after recording."""

    def replay(self) -> None:
        """Enqueues the recorded work; no Python of the step runs."""

    def read_nodes(self) -> tuple[Node, ...]:
        """All nodes in order, with what each waits for; child graphs in place of their nodes."""

    def free(self) -> None:
        """Gives up the recording; it cannot replay afterwards."""


class Recorder(Protocol):
    """Records work into graphs that share one pool."""

    @property
    def kind(self) -> Literal["cuda", "tape"]:
        """How times and memory of its recordings are labelled."""

    @property
    def capture_error_mode(self) -> str | None:
        """Which unsafe calls of which threads end a recording, in CUDA's words; None: no device."""

    def warm_up(self, work: Callable[[], None]) -> None:
        """Runs `work` eagerly on the very streams that capture, and waits for it."""

    def record(self, work: Callable[[], None]) -> Recording:
        """Runs `work` once while recording it.

        Whatever `work` raises leaves the current stream, the allocator's routing and the garbage
        collector as they were, so that the next recording works.

        Raises:
            CgprofError or the exception of `work`; `GraphManager` names the key.
        """

    def enter(self, index: int) -> AbstractContextManager[None]:
        """What a microbatch thread runs inside: the compute stream, and the recording if one is on.

        Entered on the thread's first turn, so that it finds the recording that `record` began.
        """
