"""What the host does before each launch that is timed, and graphs whose launches take turns.

A launch depends on what the host did just before: one that has worked launches faster than one
that only waited. So every series says which of the two it is, and only alike ones are compared.
It depends on the host's pace too, which may change from second to second where cores are shared:
every launch is kept with the time of a fixed loop of Python right after it, and only launches at
full pace count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from cgprof.graphs.recorder import Recording
from cgprof.measure.clock import Clock
from cgprof.measure.pace import loop_ns
from cgprof.measure.samples import launch_stats
from cgprof.record.graph import LaunchStats
from cgprof.record.worth import Estimate
from cgprof.stats.medians import median_interval
from cgprof.stats.quantiles import IntSamples, median

# What a host does between the end of a step on the device and the next launch.
# Source: preparing and finishing steps of 192 to 256 tokens operator by operator on the quiet host
# of an H200, 0.22 to 0.24 ms, and deciding; 0.13 to 0.18 in turn since a graph finishes them.
WORKED_NS = 300_000

_PASS_NS = 120_000_000  # of one graph in one pass, unless that leaves too few rounds
_LEAST_ROUNDS, _MOST_ROUNDS, _WARMUP_LAUNCHES = 12, 20, 2  # in one pass
_PASSES = 3  # over all graphs, so that a burst of noise spoils a part of each series only

_PACE_ADDITIONS = 2_000  # 60 us on a fast host
_LEAST_SHARE_FULL = 0.05  # of all launches: those at the fastest pace, but for stray readings
FULL_PACE = 1.2  # a loop that takes no more than so many times as long as theirs is at full pace
LEAST_AT_PACE = 5  # launches of a series for a quartile

Replay = Callable[[], object]


class Launch(NamedTuple):
    """One launch of a graph on an idle device, and what the host did before it."""

    waited_ns: int
    worked_ns: int
    launch_ns: int
    pace_ns: int  # of a fixed loop, right after it


Way = Callable[[Replay], Launch]


class Host:
    """Launches graphs, the device idle before each; all times are the host's.

    `work` is a little of a step's preparation, `occupy` keeps the device at work for so many ns.
    """

    def __init__(
        self,
        clock: Clock,
        work: Callable[[], object],
        occupy: Callable[[int], object],
        worked_ns: int = WORKED_NS,
    ) -> None:
        self._clock = clock
        self._work = work
        self._occupy = occupy
        self._worked_ns = worked_ns

    def launch_warm(self, replay: Replay) -> Launch:
        """Waits until the device is idle, works for a fixed time, and launches."""
        waited_ns = self._wait()
        begun_ns = self._clock.read_ns()
        end_ns = begun_ns + self._worked_ns
        worked_until_ns = begun_ns
        while worked_until_ns < end_ns:
            self._work()
            self._clock.synchronize()
            worked_until_ns = self._clock.read_ns()
        return Launch(waited_ns, worked_until_ns - begun_ns, *self._timed(replay))

    def launch_after_wait(self, replay: Replay, busy_ns: int = 0) -> Launch:
        """Waits until the device is idle, for so much work more, and launches at once."""
        if busy_ns:
            self._occupy(busy_ns)
        waited_ns = self._wait()
        return Launch(waited_ns, 0, *self._timed(replay))

    def _wait(self) -> int:
        begun_ns = self._clock.read_ns()
        self._clock.synchronize()
        return self._clock.read_ns() - begun_ns

    def _timed(self, replay: Replay) -> tuple[int, int]:
        begun_ns = self._clock.read_ns()
        replay()
        launch_ns = self._clock.read_ns() - begun_ns
        return launch_ns, loop_ns(self._clock, _PACE_ADDITIONS)


class Series:
    """The launches of one graph, each round one in every way, in passes.

    `prepare` writes inputs on which replaying the graph is valid, before each pass.
    """

    def __init__(
        self,
        recording: Recording,
        ways: Sequence[Way],
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        self._replay = recording.replay
        self._prepare = prepare
        self._ways = tuple(ways)
        self._rounds: list[list[Launch]] = []
        self._rounds_a_pass = _LEAST_ROUNDS

    @property
    def paces(self) -> list[int]:
        """The host's pace at every launch."""
        return [launch.pace_ns for found in self._rounds for launch in found]

    def probe(self) -> int:
        """Returns the second launch's time in the first way, and settles the rounds of a pass."""
        self._prepare()
        self._round()
        found = self._round()
        round_ns = sum(launch.waited_ns + launch.worked_ns + launch.launch_ns for launch in found)
        self._rounds_a_pass = min(max(_PASS_NS // max(round_ns, 1), _LEAST_ROUNDS), _MOST_ROUNDS)
        return found[0].launch_ns

    def run_pass(self) -> None:
        """Times some rounds, after a few launches that are thrown away."""
        self._prepare()
        for _ in range(max(1, _WARMUP_LAUNCHES // len(self._ways))):
            self._round()
        self._rounds += [self._round() for _ in range(self._rounds_a_pass)]

    def timed(self, slowest_pace_ns: int) -> TimedSeries:
        """Returns the launches at a pace no slower than this, and the others."""
        return TimedSeries(self._rounds, slowest_pace_ns)

    def _round(self) -> list[Launch]:
        return [way(self._replay) for way in self._ways]


class TimedSeries:
    """The launches of a series, told apart by the host's pace; rounds are whole or not counted."""

    def __init__(self, rounds: Sequence[Sequence[Launch]], slowest_pace_ns: int) -> None:
        fast = [max(one.pace_ns for one in found) <= slowest_pace_ns for found in rounds]
        self._full = [found for found, is_fast in zip(rounds, fast, strict=True) if is_fast]
        self._slow = [found for found, is_fast in zip(rounds, fast, strict=True) if not is_fast]

    @property
    def suffices(self) -> bool:
        """Whether there were enough launches at full pace."""
        return len(self._full) >= LEAST_AT_PACE

    def launches(self, way: int = 0) -> LaunchStats:
        """Returns the summary of the launches at full pace in one way."""
        return launch_stats(_launches(self._full, way), "count")

    def waited_ns(self, way: int = 0) -> int:
        """Returns how long the host waited before those (median)."""
        return median(np.array([found[way].waited_ns for found in self._full], np.int64))

    def adds(self, way: int, to: int = 0) -> Estimate:
        """Returns what one way costs more than another, in ns: the median over the rounds."""
        return _estimate(_launches(self._full, way) - _launches(self._full, to))

    def slow_adds(self, way: int = 0) -> Estimate | None:
        """Returns what a launch took more while the host was slower; None if it hardly was."""
        if len(self._slow) < LEAST_AT_PACE:
            return None
        return _estimate(_launches(self._slow, way) - self.launches(way).median_ns)


def run_passes(series: Sequence[Series], clock: Clock, deadline_ns: int) -> None:
    """Launches all graphs in passes by turns; those that met a slow host again until the deadline.

    Which graphs are launched again is chosen by the host's pace, never by their launches.
    """
    wanted, passes = list(series), 0
    while wanted:
        for one in wanted:
            if clock.read_ns() >= deadline_ns:
                return
            one.run_pass()
        passes += 1
        if passes >= _PASSES:
            slowest_ns = full_pace_ns([pace_ns for one in series for pace_ns in one.paces])
            wanted = [one for one in series if not one.timed(slowest_ns).suffices]


def full_pace_ns(paces: Sequence[int]) -> int:
    """Returns the slowest pace that counts as full, of the paces at all launches of a run."""
    fastest = sorted(paces)[int(_LEAST_SHARE_FULL * len(paces))]
    return int(FULL_PACE * fastest)


def _launches(rounds: Sequence[Sequence[Launch]], way: int) -> IntSamples:
    return np.array([found[way].launch_ns for found in rounds], np.int64)


def _estimate(differences: IntSamples) -> Estimate:
    value, low, high = median_interval(differences)
    return Estimate(value=value, low=low, high=high)
