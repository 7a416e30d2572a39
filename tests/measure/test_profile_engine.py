"""The profile over the real engine with the tape: names and numbers that meet across rooms."""

import contextlib

import numpy as np
import pytest
import torch

from cgprof.measure.accounting import INSTANTIATED, RECORDED, WARMED_UP
from cgprof.measure.captures import CapturePoints, capture_keys, memory_totals, stream_names
from cgprof.measure.clock import clock_for
from cgprof.measure.memory import MemoryReader
from cgprof.measure.nvml import NvmlDevice, Pynvml, cuda_device
from cgprof.measure.profile import profile_key, profile_round_robin
from cgprof.record.samples import SampleSink
from tests.support.builders import build_engine, tiny_run


@contextlib.contextmanager
def _engine(device="cpu"):
    engine = build_engine(tiny_run(sizes=(2, 8), dbo=True, device=device))
    try:
        with engine.active():
            yield engine
    finally:
        engine.close()


def _profile(engine, reader, nvml=None):
    points, sink, clock = CapturePoints(), SampleSink(), clock_for(engine.device)
    records = list(capture_keys(engine, reader, points, lambda key: None))
    totals = memory_totals(engine, points, records)
    records = [profile_key(engine, record, clock, sink, nvml) for record in records]
    return profile_round_robin(engine, records, clock, sink), totals, sink


def test_capture_marks_are_those_that_memory_accounting_reads():
    with _engine() as engine:
        seen = []
        engine.capture(engine.plan.keys[0], seen.append)
    assert seen == [WARMED_UP, RECORDED, INSTANTIATED]


def test_profile_of_a_tape_engine_fills_every_figure_of_every_key():
    with _engine() as engine:
        records, totals, sink = _profile(engine, MemoryReader(engine.device))
        keys = [record.key for record in records]
        replays = [engine.graphs.captured[key].replays for key in keys]
    assert [key.is_twin for key in keys] == [False, False, True]
    assert [record.failure for record in records] == [None] * 3
    for record, count in zip(records, replays, strict=True):
        assert record.replays == count > 0
        assert record.nodes["kernel"] > 0
        for stats in (record.eager, record.replay, record.round_robin):
            assert stats.launch.median_ns > 0
            assert stats.wait.count == stats.launch.count
            assert stats.device is None
        assert record.first_replay_ns > 0
        assert 1 <= record.experts_hit <= engine.model_config.num_experts
    assert totals.source == "tape-arena"
    assert totals.plain_bytes == sum(
        record.memory.pool_bytes for record in records if not record.key.is_twin
    )
    frame = sink.table().to_pandas()
    assert set(frame["key"]) == {str(key) for key in keys}
    assert set(frame["phase"]) == {"eager", "first", "hot", "round-robin"}
    assert np.all(
        frame.filter(like="_ns").drop(columns=["device_ns", "vote_ns", "launch_cpu_ns"]) >= 0
    )


@pytest.mark.gpu
def test_profile_of_a_cuda_engine_accounts_for_its_memory_and_device_time():
    with _engine("cuda") as engine:
        nvml = NvmlDevice(Pynvml(), cuda_device(torch.cuda.current_device()).uuid)
        reader = MemoryReader(engine.device, nvml, stream_names(engine))
        records, totals, _ = _profile(engine, reader, nvml)
    assert [record.failure for record in records] == [None] * 3
    assert totals.source == "device"
    assert records[0].memory.pool_bytes > 0
    assert set(records[0].memory.pool_by_stream) <= {"compute", "communication"}
    for record in records:
        memory, seen = record.memory, record.witness
        parts = memory.pool_bytes + memory.instantiate_bytes + sum(memory.workspaces.values())
        assert parts + memory.rest_bytes == seen.device_delta_bytes
        for stats in (record.eager, record.replay, record.round_robin):
            assert stats.device.count == stats.launch.count
            assert stats.device.min_ns > 0
    grown = sum(record.witness.device_delta_bytes for record in records)
    assert totals.plain_bytes + totals.twin_bytes == grown
