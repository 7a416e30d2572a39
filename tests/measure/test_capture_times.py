import gc

from cgprof.measure.capture_times import (
    CaptureWatch,
    describe_parts,
    seconds_by_part,
    watched_capture,
)
from cgprof.record.graph import CaptureTimes


class Hands:
    """A clock that the test moves."""

    def __init__(self):
        self.now = 1000

    def __call__(self):
        return self.now

    def collect(self, watch, ns):
        watch.collecting("start", {})
        self.now += ns
        watch.collecting("stop", {})


def test_parts_are_apart_and_add_up_to_the_whole():
    clock = Hands()
    watch = CaptureWatch(clock)
    for phase, ns, gc_ns, reading_ns in (
        ("warmed", 500, 30, 7),
        ("recorded", 300, 0, 8),
        ("instantiated", 40, 5, 9),
    ):
        clock.now += ns
        if gc_ns:
            clock.collect(watch, gc_ns)
        watch.mark(phase)
        clock.now += reading_ns
        watch.lap("readings")
    clock.collect(watch, 100)
    clock.now += 11
    watch.lap("readings")
    times = watch.times()
    assert times == CaptureTimes(
        warm_up_ns=500, record_ns=300, instantiate_ns=40, gc_ns=135, readings_ns=7 + 8 + 9 + 11
    )
    assert times.total_ns == clock.now - 1000


def test_failed_capture_gives_its_time_to_the_part_that_it_was_in():
    clock = Hands()
    watch = CaptureWatch(clock)
    clock.now += 500
    watch.mark("warmed")
    clock.now += 300
    watch.lap(watch.under_way)
    assert watch.times() == CaptureTimes(warm_up_ns=500, record_ns=300)


def test_collector_is_watched_during_a_capture_and_not_after():
    before = list(gc.callbacks)
    with watched_capture() as watch:
        gc.collect()
    assert gc.callbacks == before
    assert watch.times().gc_ns > 0


def test_parts_are_described_with_the_largest_first():
    times = [CaptureTimes(warm_up_ns=1_000_000_000, record_ns=3_000_000_000)] * 2
    assert describe_parts(seconds_by_part(times)) == "captures took 8.0 s: record 75%, warm-up 25%"
    assert describe_parts(seconds_by_part([])) == "captures took 0.0 s"
