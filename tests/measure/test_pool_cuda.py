"""What captured graphs hold of the device: the pool they share, and what they give back."""

import gc

import pytest
import torch

from cgprof.graphs.cuda import CudaRecorder
from cgprof.measure.captures import CapturePoints, capture_keys, memory_totals
from cgprof.measure.memory import MemoryReader, used_bytes
from cgprof.record.types import RankRecord
from cgprof.report.checks_of_memory import POOL_RATIO
from cgprof.report.memory_sum import memory_sums
from tests.support.builders import build_engine, captured_engine, tiny_model, tiny_run

pytestmark = pytest.mark.gpu
MIB = 1 << 20
SIZES = (128, 256, 384, 512)
LIMITS = {"max_num_seqs": 512, "max_num_batched_tokens": 512, "max_model_len": 64}
WIDE = tiny_model(num_experts=0, num_layers=2, hidden_size=1024, ffn_size=8192)


def pool_bytes(sizes):
    """What an engine of its own reserves for graphs that are captured in this order."""
    engine = build_engine(tiny_run(sizes=tuple(sorted(sizes)), device="cuda", **LIMITS), WIDE)
    try:
        with engine.active():
            by_size = {key.num_tokens: key for key in engine.plan.keys}
            for size in sizes:
                engine.capture(by_size[size], lambda phase: None)
            return sum(engine.recorder.pool_by_stream().values())
    finally:
        engine.close()


def test_sizes_captured_largest_first_share_the_pool_of_the_largest():
    alone = {size: pool_bytes((size,)) for size in SIZES}
    descending, ascending = pool_bytes(SIZES[::-1]), pool_bytes(SIZES)
    assert 0 < alone[512] <= descending <= POOL_RATIO * alone[512]
    assert ascending >= descending
    assert sum(alone.values()) > POOL_RATIO * descending


def test_pool_stays_in_the_report_when_outputs_are_deleted_and_goes_with_the_graphs():
    compute = torch.cuda.Stream()
    reader = MemoryReader(torch.device("cuda"), streams={compute.cuda_stream: "compute"})
    before = reader.read()
    recorder = CudaRecorder(compute)
    outputs, recordings = [], []
    source = torch.ones(1024, 1024, device="cuda")
    recorder.warm_up(lambda: source * 2)
    for rows in range(1000, 0, -100):
        recordings.append(recorder.record(lambda n=rows: outputs.append(source[:n] * 2)))
        recordings[-1].instantiate()
    captured = reader.read()
    held = captured.pool_by_stream["compute"] - before.pool_by_stream.get("compute", 0)
    assert held >= sum(output.nbytes for output in outputs)
    allocated = torch.cuda.memory_allocated()
    outputs.clear()
    after = reader.read()
    assert torch.cuda.memory_allocated() < allocated  # the counters that make a pool look free
    assert after.pool_by_stream == captured.pool_by_stream
    assert sum(recorder.pool_by_stream().values()) == held
    for recording in recordings:
        recording.free()
    del recorder, recordings, recording
    gc.collect()
    assert reader.read().pool_by_stream == before.pool_by_stream


def test_total_of_51_graphs_is_the_pool_and_what_the_driver_took():
    run = tiny_run(sizes=tuple(range(1, 52)), device="cuda", max_num_seqs=64)
    with captured_engine(run):
        pass  # kernels are loaded now
    engine = build_engine(run)
    try:
        with engine.active():
            reader, points = MemoryReader(engine.device), CapturePoints()
            reader.read()
            start = used_bytes(engine.device)
            records = list(capture_keys(engine, reader, points, lambda key: None))
            grown = used_bytes(engine.device) - start
            totals = memory_totals(engine, points, records)
    finally:
        engine.close()
    assert [record.failure for record in records] == [None] * 51
    whole = memory_sums(RankRecord(graphs=tuple(records), totals=totals))[-1]
    assert abs(whole.device_delta_bytes - grown) <= max(64 * MIB, 0.05 * grown)
    assert abs(whole.parts_bytes - whole.given_back_bytes - grown) <= max(64 * MIB, 0.05 * grown)
