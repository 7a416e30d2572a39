from cgprof.measure.clock import CpuClock
from cgprof.measure.pace import host_pace_ns


class CountingClock(CpuClock):
    """Each loop takes as long as the next of these says."""

    def __init__(self, times_ns):
        self._reads = [read for time_ns in times_ns for read in (0, time_ns)]

    def read_ns(self):
        return self._reads.pop(0)


def test_pace_is_the_median_of_a_few_loops():
    assert host_pace_ns(CountingClock([900, 300, 310, 5000, 305])) == 310


def test_pace_of_this_host_is_that_of_ten_thousand_additions():
    assert 50_000 < host_pace_ns(CpuClock()) < 50_000_000
