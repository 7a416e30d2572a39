import re

import pytest
import torch

from cgprof.engine.room import ran_out
from cgprof.errors import CaptureError, MicrobatchError
from cgprof.measure.captures import CapturePoints, capture_keys, stream_names
from cgprof.measure.memory import MemoryReader
from cgprof.measure.shortage import Shortage, with_final_words
from tests.support.builders import build_engine, tiny_run
from tests.support.graphs import decode_key
from tests.support.planted import in_last_layer, nothing_left_behind
from tests.support.records import graph_record

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MIB = 1 << 20


def failed(cause):
    """A capture that failed inside a microbatch, as GraphManager raises it."""
    try:
        try:
            raise MicrobatchError(1, str(cause)) from cause
        except MicrobatchError as error:
            raise CaptureError("FULL-8x8q1-mb2", str(error)) from error
    except CaptureError as error:
        return error


@pytest.mark.parametrize(
    ("cause", "tried"),
    [
        (MemoryError(), ""),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0"),
            "20.00 MiB",
        ),
        (RuntimeError("CUDA error: out of memory"), ""),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), ""),
        (
            RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes"
            ),
            "64 bytes",
        ),
        (ValueError("planted"), None),
    ],
)
def test_memory_is_seen_as_the_cause_wherever_it_ran_out(cause, tried):
    assert ran_out(cause) == tried
    assert ran_out(failed(cause)) == tried


def test_words_name_key_free_total_pool_what_fitted_and_one_knob():
    shortage = Shortage(
        free_bytes=3 * MIB, total_bytes=64 * MIB, pool_bytes=MIB, tried="4 MiB", largest_planned=512
    )
    key, smaller = decode_key(512), decode_key(8)
    assert shortage.describe(key, None) == (
        f"capture of {key} failed: out of memory (4 MiB asked for): 3 MiB (3145728 bytes) free of "
        "64 MiB (67108864), the graph pool held 1 MiB (1048576); no graph has fitted; lower "
        "--max-cudagraph-capture-size, now 512"
    )
    records = [
        graph_record(512, key=key, failure=shortage.describe(key, None)),
        graph_record(8, key=smaller),
        graph_record(4, failure="planted"),
    ]
    final = with_final_words(records, {key: shortage})
    assert f"the largest that fitted is {smaller};" in final[0].failure
    assert final[1:] == records[1:]


def hogs(part, x):
    """More memory than any machine has."""
    if x.is_cuda:
        torch.empty(1 << 46, dtype=torch.uint8, device=x.device)
    raise MemoryError


def captured(engine, faulty):
    points, records = CapturePoints(), []
    reader = MemoryReader(engine.device, None, stream_names(engine))
    for record in capture_keys(engine, reader, points, lambda key: None):
        records.append(record)
        if len(records) == faulty:
            return points, records
    return points, records


@pytest.mark.parametrize("after_passes", [0, 1], ids=["warming", "recording"])
@pytest.mark.parametrize("microbatch", [None, 1])
@pytest.mark.parametrize("device", DEVICES)
def test_key_that_runs_out_of_memory_is_named_and_the_others_are_captured(
    device, microbatch, after_passes
):
    engine = build_engine(tiny_run(sizes=(2, 4, 8), dbo=True, device=device))
    wanted = engine.plan.plain[1] if microbatch is None else engine.plan.twins[0]
    capture = engine.capture

    def capture_with_fault(key, mark):
        if key != wanted:
            return capture(key, mark)
        with (
            nothing_left_behind(engine),
            in_last_layer(engine, hogs, microbatch=microbatch, after_passes=after_passes),
        ):
            return capture(key, mark)

    engine.capture = capture_with_fault
    try:
        with engine.active():
            points, records = captured(engine, None)
            records = with_final_words(records, points.shortages)
    finally:
        del engine.capture
        engine.close()
    assert [r.key for r in records if r.failure] == [wanted]
    assert len(records) == len(engine.plan.keys) == 5
    failure = next(r.failure for r in records if r.failure)
    asked = r" \(\S+ \S+ asked for\)" if device == "cuda" else ""
    assert re.fullmatch(
        rf"capture of {wanted} failed: out of memory{asked}: .* \(\d+ bytes\) free of .* \(\d+\), "
        rf"the graph pool held .* \(\d+\); the largest that fitted is {engine.plan.plain[0]}; "
        r"lower --max-cudagraph-capture-size, now 8",
        failure,
    )
    lost = next(r for r in records if r.failure)
    assert lost.memory is None
    assert lost.times.warm_up_ns > 0


@pytest.mark.gpu
def test_device_that_is_full_refuses_every_graph_and_takes_them_when_there_is_room():
    engine = build_engine(tiny_run(sizes=(4, 8), device="cuda"))
    try:
        with engine.active():
            engine.capture(engine.plan.keys[0], lambda phase: None)
            engine.graphs.free()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(0).total_memory
            ballast = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
            torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
            held = hold_all_free()
            try:
                points, records = captured(engine, None)
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0)
                held.clear()
                del ballast
            failures = [r.failure for r in with_final_words(records, points.shortages)]
            assert len(failures) == 2
            assert all("out of memory" in failure for failure in failures)
            assert all("no graph has fitted" in failure for failure in failures)
            points, records = captured(engine, None)
            assert [r.failure for r in records] == [None, None]
    finally:
        engine.close()


def hold_all_free():
    """Takes what the allocator could still give out of its own segments."""
    held = []
    for size in (MIB, 1 << 16, 512):
        while True:
            try:
                held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                break
    return held
