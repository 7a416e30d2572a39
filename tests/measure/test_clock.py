import pytest
import torch

from cgprof.measure.clock import CpuClock, CudaClock, clock_for, timer_floor_ns
from tests.support.stepping import ScriptedClock


def test_cpu_clock_is_monotone_and_has_no_device_time():
    clock = CpuClock()
    reads = [clock.read_ns() for _ in range(1000)]
    assert reads == sorted(reads)
    span = clock.new_span()
    span.begin()
    span.end()
    clock.synchronize()
    assert span.ns() is None


def test_timer_floor_is_the_cost_of_one_read():
    assert timer_floor_ns(ScriptedClock(read_cost=23)) == 23
    assert timer_floor_ns(CpuClock()) >= 0


def test_clock_for_a_cpu_is_the_cpu_clock():
    assert isinstance(clock_for(torch.device("cpu")), CpuClock)


def _span(clock, stream, repeats):
    matrix = torch.ones(2048, 2048, device="cuda")
    with torch.cuda.stream(stream):
        matrix @ matrix
        clock.synchronize()
        span = clock.new_span()
        span.begin()
        for _ in range(repeats):
            matrix @ matrix
        span.end()
        return span.ns()


@pytest.mark.gpu
def test_cuda_clock_spans_the_work_of_the_current_stream():
    clock = clock_for(torch.device("cuda"))
    assert isinstance(clock, CudaClock)
    stream = torch.cuda.Stream()
    short, long = _span(clock, stream, 4), _span(clock, stream, 400)
    assert 0 < short < long / 4
