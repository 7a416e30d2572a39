"""Times the stages of steps in the engine's own loop, from the vote to the tokens.

Each step waits for its tokens, so that the next launch finds an idle device. Only clock reads and
device marks stand between the stages. The device time of a step is read while the next one runs,
between launch and finish: that is of no stage, and off the wait where the device works on.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cgprof.graphs.cuda import gc_paused
from cgprof.measure.clock import Clock, Span
from cgprof.measure.samples import Samples
from cgprof.measure.stopping import CountRule, StoppingRule
from cgprof.shapes import StepDecision
from cgprof.stats.quantiles import median

if TYPE_CHECKING:
    from cgprof.engine.step import StepRunner
    from cgprof.engine.types import Step

_MARKS = 9  # around vote, decide and prepare (4), launch (2), finish and wait (3)
_OVERHEAD_STEPS = 501


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A step and what it is forced to run as; None leaves the choice to the engine.

    `runner` is who runs it, None for the one of the series.
    """

    step: Step
    decision: StepDecision | None = None
    runner: StepRunner | None = None


def sample_steps(
    runner: StepRunner,
    step: Step,
    clock: Clock,
    rule: StoppingRule,
    *,
    decision: StepDecision | None = None,
    warmup: int = 0,
) -> Samples:
    """Returns the samples of one step, run again and again until the rule ends the series.

    A forced `decision` replaces the engine's answer; deciding is timed all the same. `warmup`
    steps run before and are thrown away.
    """
    turn = Turn(step=step, decision=decision)
    series = _Series(clock)
    with gc_paused():
        for _ in range(warmup):
            _Series(clock).run(runner, turn)
        clock.synchronize()
        start_ns = clock.read_ns()
        while not rule.add(series.run(runner, turn), (clock.read_ns() - start_ns) / 1e9):
            pass
    return series.samples(rule.stopped_by)


def round_robin(
    runner: StepRunner, turns: Sequence[Turn], clock: Clock, rounds: int
) -> tuple[Samples, ...]:
    """Returns the samples of each turn, all turns taken one after another, `rounds` times.

    One round before the first is thrown away.
    """
    series = [_Series(clock) for _ in turns]
    rule = CountRule(rounds)
    with gc_paused():
        for turn in turns:
            _Series(clock).run(turn.runner or runner, turn)
        clock.synchronize()
        for _ in range(rounds):
            for turn, one in zip(turns, series, strict=True):
                one.run(turn.runner or runner, turn)
            rule.add(0, 0.0)
    return tuple(one.samples(rule.stopped_by) for one in series)


def recording_overhead_ns(clock: Clock) -> int:
    """Returns what the timing calls of one step cost: the median of steps without stages."""
    series = _Series(clock)
    costs = np.zeros(_OVERHEAD_STEPS, np.int64)
    with gc_paused():
        for index in range(_OVERHEAD_STEPS):
            start_ns = clock.read_ns()
            series.run_empty()
            costs[index] = clock.read_ns() - start_ns
            clock.synchronize()
    return median(costs)


class _Series:
    """The marks of one series of steps, flat in one array."""

    def __init__(self, clock: Clock) -> None:
        self._read = clock.read_ns
        self._marks = array("q")
        self._device_ns = array("q")
        self._span, self._spare = clock.new_span(), clock.new_span()
        self._unread: Span | None = None
        self._has_peers = False

    def run(self, runner: StepRunner, turn: Turn) -> int:
        """Runs one step and returns its launch time."""
        self._has_peers = runner.has_peers
        step, mark, read = turn.step, self._marks.append, self._read
        mark(read())
        votes = runner.share(step)
        mark(read())
        decided = runner.decide(step, votes)
        mark(read())
        decision = turn.decision or decided
        prepared = runner.prepare(step, decision)
        mark(read())
        self._span.begin()
        mark(read())
        hidden = runner.launch(prepared)
        mark(read())
        self._end_span()
        mark(read())
        pending = runner.finish(prepared, hidden)
        mark(read())
        pending.wait()
        mark(read())
        return self._marks[-4] - self._marks[-5]

    def run_empty(self) -> None:
        """Makes the timing calls of one step, with no stage between them."""
        mark, read = self._marks.append, self._read
        for _ in range(4):
            mark(read())
        self._span.begin()
        for _ in range(2):
            mark(read())
        self._end_span()
        for _ in range(3):
            mark(read())

    def samples(self, stopped_by: str) -> Samples:
        """Returns the stages' times."""
        self._read_device()
        marks = np.array(self._marks, np.int64).reshape(-1, _MARKS)
        return Samples(
            vote_ns=marks[:, 1] - marks[:, 0] if self._has_peers else None,
            decide_ns=marks[:, 2] - marks[:, 1],
            prepare_ns=marks[:, 3] - marks[:, 2],
            launch_ns=marks[:, 5] - marks[:, 4],
            finish_ns=marks[:, 7] - marks[:, 6],
            wait_ns=marks[:, 8] - marks[:, 7],
            device_ns=np.array(self._device_ns, np.int64) if self._device_ns else None,
            stopped_by=stopped_by,
        )

    def _end_span(self) -> None:
        """Ends the step's span and reads the one before, while the device has work to do."""
        self._span.end()
        self._read_device()
        self._unread = self._span
        self._span, self._spare = self._spare, self._span

    def _read_device(self) -> None:
        if self._unread is None:
            return
        device_ns = self._unread.ns()
        if device_ns is not None:
            self._device_ns.append(device_ns)
        self._unread = None
