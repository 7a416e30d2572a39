"""Launch and device times of graphs that are large enough to tell sizes apart."""

import time

import numpy as np
import pytest
import torch

from cgprof.measure.captures import CapturePoints, capture_keys
from cgprof.measure.clock import CudaClock
from cgprof.measure.launch import sample_steps
from cgprof.measure.memory import MemoryReader
from cgprof.measure.profile import profile_key
from cgprof.measure.stopping import CountRule
from cgprof.record.samples import SampleSink
from tests.support.builders import build_engine, tiny_model, tiny_run

pytestmark = pytest.mark.gpu
WIDE = tiny_model(
    num_experts=0,
    num_layers=2,
    hidden_size=4096,
    ffn_size=65536,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    dtype="bfloat16",
)


@pytest.fixture(scope="module")
def profiled():
    """An engine with the keys of 512 and 1 tokens captured, and their records."""
    limits = {"max_num_seqs": 512, "max_num_batched_tokens": 512, "max_model_len": 64}
    engine = build_engine(tiny_run(sizes=(1, 512), device="cuda", **limits), WIDE)
    try:
        with torch.inference_mode(), engine.active():
            clock, sink = CudaClock(), SampleSink()
            reader = MemoryReader(engine.device)
            records = list(capture_keys(engine, reader, CapturePoints(), lambda key: None))
            yield engine, [profile_key(engine, record, clock, sink) for record in records]
    finally:
        engine.close()


def test_device_times_are_ordered_by_size_as_eager_and_launch_is_apart(profiled):
    _, (large, small) = profiled
    assert (large.key.num_tokens, small.key.num_tokens) == (512, 1)
    assert large.replay.device.median_ns > small.replay.device.median_ns
    assert large.eager.device.median_ns > small.eager.device.median_ns
    assert large.replay.launch.median_ns < large.replay.device.median_ns


def test_size_where_a_graph_saves_no_step_time_is_device_bound(profiled):
    _, (large, _) = profiled
    assert large.bound == "device"
    assert any(warning.startswith("device-bound: ") for warning in large.warnings)


def test_reported_launch_is_that_of_an_idle_queue_not_of_a_full_one(profiled):
    engine, (large, small) = profiled
    replay = engine.graphs.captured[large.key].recording.replay
    torch.cuda.synchronize()
    start = time.perf_counter_ns()
    for _ in range(1000):
        replay()
    torch.cuda.synchronize()
    each_ns = (time.perf_counter_ns() - start) / 1000
    idle = np.zeros(200, np.int64)
    for index in range(idle.size):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        replay()
        idle[index] = time.perf_counter_ns() - start
    torch.cuda.synchronize()
    reported = large.replay.launch.median_ns
    assert np.median(idle) / 2 < reported < each_ns / 2
    assert reported < 4 * small.replay.launch.median_ns


class KeepingClock(CudaClock):
    """Keeps what it read."""

    def __init__(self):
        super().__init__()
        self.reads = []

    def read_ns(self):
        self.reads.append(super().read_ns())
        return self.reads[-1]


def test_stages_add_up_to_the_step_within_a_tenth(profiled):
    engine, (large, _) = profiled
    clock, reads = KeepingClock(), 10  # nine marks and the rule's
    step, decision = engine.live_step(large.key), engine.decision_for(large.key)
    samples = sample_steps(engine.runner, step, clock, CountRule(20), decision=decision)
    marks = np.array(clock.reads[1:], np.int64).reshape(20, reads)
    whole = np.median(marks[:, 8] - marks[:, 1])
    assert 0.9 * whole <= samples.stats().step.median_ns <= whole
