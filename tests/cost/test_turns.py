from types import SimpleNamespace

import pytest

from cgprof.cost.turns import WORKED_NS, Host, Launch, Series, TimedSeries, full_pace_ns, run_passes
from tests.support.stepping import ScriptedClock

WORK_NS, LAUNCH_NS = 70, 9


class Device:
    """A clock that waiting moves: work is enqueued, and `synchronize` waits until it is done."""

    def __init__(self):
        self.clock = ScriptedClock()
        self.pending_ns = 0
        self.worked = False
        self.launches = []  # each "warm" where the host worked before it, else "cold"
        self.clock.synchronize = self.synchronize

    def synchronize(self):
        self.clock.advance(self.pending_ns)
        self.pending_ns = 0

    def work(self):
        self.clock.advance(WORK_NS)
        self.pending_ns += 1
        self.worked = True

    def occupy(self, ns):
        self.pending_ns += ns

    def graph(self, device_ns, warm_ns=LAUNCH_NS, cold_ns=LAUNCH_NS):
        def replay():
            assert self.pending_ns == 0, "still busy"
            warm, self.worked = self.worked, False
            self.launches.append("warm" if warm else "cold")
            self.clock.advance(warm_ns if warm else cold_ns)
            self.pending_ns += device_ns

        return SimpleNamespace(replay=replay)

    def host(self, worked_ns=200):
        return Host(self.clock, self.work, self.occupy, worked_ns)


def test_a_warm_host_works_for_its_time_on_an_idle_device_and_then_launches():
    device = Device()
    host, graph = device.host(), device.graph(5_000)
    assert host.launch_warm(graph.replay) == (0, 213, 9, 0)  # three times 70, and 1 to wait for
    waited_ns, worked_ns, launch_ns, _ = host.launch_warm(graph.replay)
    assert (waited_ns, worked_ns, launch_ns) == (5_000, 213, 9)
    assert device.launches == ["warm", "warm"]


def test_work_is_as_long_before_every_graph_whatever_its_time_on_the_device():
    worked = set()
    for device_ns in (10, 5_000, 9_000_000):
        device = Device()
        host, graph = device.host(), device.graph(device_ns)
        for _ in range(3):
            worked.add(host.launch_warm(graph.replay).worked_ns)
    assert worked == {213}
    assert 100_000 <= WORKED_NS <= 1_000_000


def test_a_host_after_a_wait_launches_at_once():
    device = Device()
    host, graph = device.host(), device.graph(5_000)
    host.launch_after_wait(graph.replay)
    assert host.launch_after_wait(graph.replay) == (5_000, 0, 9, 0)
    assert host.launch_after_wait(graph.replay, busy_ns=700) == (5_700, 0, 9, 0)
    assert device.launches == ["cold"] * 3


def test_both_ways_alternate_and_their_difference_is_what_the_wait_adds():
    device, prepared = Device(), []
    host = device.host()
    series = Series(
        device.graph(5_000, warm_ns=9, cold_ns=40),
        (host.launch_warm, host.launch_after_wait),
        lambda: prepared.append(len(device.launches)),
    )
    assert not series.paces
    assert series.probe() == 9
    series.run_pass()
    series.run_pass()
    assert device.launches == ["warm", "cold"] * (len(device.launches) // 2)
    timed = series.timed(0)
    assert (timed.launches(0).median_ns, timed.launches(1).median_ns) == (9, 40)
    assert timed.launches(0).count == timed.launches(1).count == 40
    assert (timed.waited_ns(0), timed.waited_ns(1)) == (5_000, 5_000)
    adds = timed.adds(1, to=0)
    assert (adds.value, adds.low, adds.high) == (31, 31, 31)
    # Before the probe's two rounds and each pass of one round thrown away and twenty timed.
    assert prepared == [0, 4, 46]


@pytest.mark.parametrize(("device_ns", "rounds"), [(1_000, 20), (7_000_000, 17), (60_000_000, 12)])
def test_dear_graphs_are_launched_less_often_but_never_too_rarely(device_ns, rounds):
    device = Device()
    series = Series(device.graph(device_ns), (device.host().launch_warm,))
    series.probe()
    series.run_pass()
    assert series.timed(0).launches().count == rounds
    assert len(device.launches) == 2 + 2 + rounds


def rounds_of(*launches):
    """Rounds of one way, from pairs of (launch, pace)."""
    return [[Launch(0, 0, launch_ns, pace_ns)] for launch_ns, pace_ns in launches]


def test_launches_of_a_slower_host_are_told_apart():
    fast, slow = [(9, 60), (10, 66), (11, 61)] * 2, [(20, 110), (22, 105), (24, 130)] * 2
    timed = TimedSeries(rounds_of(*fast, *slow), slowest_pace_ns=72)
    assert timed.suffices
    assert (timed.launches().median_ns, timed.launches().count) == (10, 6)
    adds = timed.slow_adds()
    assert (adds.value, adds.low, adds.high) == (12, 10, 14)


def test_few_launches_at_one_pace_say_nothing():
    timed = TimedSeries(rounds_of(*[(9, 60)] * 6, *[(20, 110)] * 4), slowest_pace_ns=72)
    assert timed.slow_adds() is None
    assert not TimedSeries(rounds_of(*[(9, 60)] * 4), slowest_pace_ns=72).suffices


def test_a_round_counts_only_if_all_of_it_was_at_full_pace():
    half = [Launch(0, 0, 9, 60), Launch(0, 0, 40, 110)]
    timed = TimedSeries([half] * 3 + [[Launch(0, 0, 9, 60), Launch(0, 0, 12, 60)]] * 5, 72)
    assert timed.launches(1).median_ns == 12
    assert timed.launches(0).count == 5


def test_full_pace_is_near_the_fastest_but_for_stray_readings():
    assert full_pace_ns([1] + [60] * 60 + [110] * 40) == 72
    assert full_pace_ns([110] * 40) == 132


def paced_graph(device, paces_ns):
    """A graph beside which a reading of the clock takes so long, launch after launch."""
    graph = device.graph(5_000)
    launch, left = graph.replay, list(paces_ns)

    def replay():
        launch()
        device.clock.read_cost = left.pop(0) if len(left) > 1 else left[0]

    return SimpleNamespace(replay=replay)


def paced_series(device, paces_ns):
    return Series(paced_graph(device, paces_ns), (device.host().launch_warm,))


def test_only_graphs_that_met_a_slow_host_are_launched_again_until_it_is_fast():
    device = Device()
    fast, slow = paced_series(device, [60]), paced_series(device, [110] * 80 + [60])
    run_passes([fast, slow], device.clock, deadline_ns=10**9)
    assert len(fast.paces) == 3 * 12
    assert len(slow.paces) > 80
    assert slow.paces.count(60) >= 5
    assert fast.timed(72).suffices
    assert slow.timed(72).suffices


def test_a_host_that_stays_slow_beside_one_graph_ends_with_the_time():
    device = Device()
    fast, slow = paced_series(device, [60]), paced_series(device, [110])
    run_passes([fast, slow], device.clock, deadline_ns=4_000_000)
    assert not slow.timed(72).suffices
    assert len(fast.paces) == 3 * 12 < len(slow.paces)
    assert 4_000_000 <= device.clock.now < 4_500_000
    late = paced_series(device, [60])
    run_passes([late], device.clock, deadline_ns=0)
    assert late.paces == []
