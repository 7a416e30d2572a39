"""One rank's part in every step of all ranks: votes, equal decisions, and an end to waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from cgprof.config.schema import RunConfig
from cgprof.errors import CaptureError
from cgprof.graphs.manager import GraphManager
from cgprof.parallel.deadline import Deadline, end_rank
from cgprof.parallel.dp import VoteExchange, decision_state
from cgprof.parallel.groups import Ranks, collective_cause
from cgprof.shapes import GraphKey, StepDecision, StepVote


class Peers:
    """The other ranks, as one step sees them."""

    def __init__(self, ranks: Ranks, graphs: GraphManager, config: RunConfig) -> None:
        self.size = ranks.size
        self._ranks = ranks
        self._graphs = graphs
        self._config = config
        self._exchange = VoteExchange(ranks, self._state_hash)
        self._state: tuple[tuple[GraphKey, ...], int] | None = None
        self._names: dict[GraphKey, str] = {}
        self._startup_s = config.parallel.startup_timeout_s
        self._deadline: Deadline | None = None
        if ranks.device.type == "cuda":
            # A captured collective is seen by no watchdog of the library; on the CPU gloo waits
            # for a limited time by itself.
            ends = end_rank(ranks.rank, ranks.stuck)
            self._deadline = Deadline(config.parallel.replay_timeout_s, ends)

    def start(self, vote: StepVote) -> None:
        """Sends this rank's vote."""
        self._exchange.start(vote)

    def finish(self) -> Sequence[StepVote]:
        """Returns all votes in rank order.

        Raises:
            RankError: A rank does not answer, or would decide by other state.
        """
        return self._exchange.finish()

    def check(self, decision: StepDecision) -> None:
        """Compares the decision with the other ranks', if the run asks for it.

        Raises:
            RankError: They differ.
        """
        if self._config.parallel.verify_decisions:
            self._exchange.verify(decision)

    def launched(self, key: GraphKey, done: Callable[[], bool]) -> None:
        """Gives what was just launched its deadline; this process ends if it is not met."""
        if self._deadline is None:
            return
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = f"a step of {key} did not finish"
        self._deadline.watch(done, name)

    @contextmanager
    def patient(self, what: str) -> Iterator[None]:
        """Waits as long as a start-up may take, for compiling and warm-up.

        Raises:
            RankError: A capture failed here because another rank is gone or does not answer.
        """
        deadline = self._deadline
        watched = nullcontext() if deadline is None else deadline.extended(self._startup_s, what)
        with self._ranks.extended(self._startup_s), watched:
            try:
                yield
            except CaptureError as error:
                failed = collective_cause(error)
                if failed is None:
                    raise
                raise self._ranks.lost(failed) from error

    def close(self) -> None:
        """Ends the deadline's thread."""
        if self._deadline is not None:
            self._deadline.close()

    def _state_hash(self) -> int:
        """All else that a decision reads: what is captured, the thresholds, the code."""
        keys = self._graphs.keys
        if self._state is None or self._state[0] is not keys:
            self._state = (keys, decision_state(keys, self._config.microbatch))
        return self._state[1]
