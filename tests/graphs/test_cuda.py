import gc
import threading

import pytest
import torch

from cgprof.errors import CaptureError, RecordingError, ReplayError
from cgprof.graphs.manager import GraphManager
from tests.support.copies import pinned_copies
from tests.support.graphs import decode, decode_key, input_buffers

pytestmark = pytest.mark.gpu
PLAIN = decode_key(8)


@pytest.fixture
def compute():
    return torch.cuda.Stream()


@pytest.fixture
def side():
    return torch.cuda.Stream()


@pytest.fixture
def recorder(compute, side):
    from cgprof.graphs.cuda import CudaRecorder

    return CudaRecorder(compute, (side,))


class Step:
    """A matmul chain from a fixed input to a fixed output."""

    def __init__(self, rows=8, width=256):
        generator = torch.Generator("cuda").manual_seed(0)
        self.x = torch.randn(rows, width, device="cuda", generator=generator)
        self.w = torch.randn(width, width, device="cuda", generator=generator) / 16
        self.out = torch.zeros(rows, width, device="cuda")

    def __call__(self):
        y = self.x
        for _ in range(6):
            y = torch.tanh(y @ self.w)
        self.out.copy_(y)


def record(recorder, work):
    recorder.warm_up(work)
    recording = recorder.record(work)
    recording.instantiate()
    return recording


def replayed(recording, out):
    out.fill_(float("nan"))
    recording.replay()
    torch.cuda.synchronize()
    return out.clone()


def check_untouched(recorder, compute):
    """A capture after a failure: nothing is left over, and the next one works."""
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert not torch.cuda.is_current_stream_capturing()
    with torch.cuda.stream(compute):
        assert not torch.cuda.is_current_stream_capturing()
        before = recorder.pool_by_stream()
        fresh = torch.empty(48 << 20, dtype=torch.uint8, device="cuda")
        assert recorder.pool_by_stream() == before
        owner = [
            segment["segment_pool_id"]
            for segment in torch.cuda.memory_snapshot()
            if segment["address"] <= fresh.data_ptr() < segment["address"] + segment["total_size"]
        ]
        assert [tuple(pool) for pool in owner] == [(0, 0)]
        pinned = torch.ones(1 << 16).pin_memory()
        fresh[: 4 << 16].view(torch.float32).copy_(pinned, non_blocking=True)
        torch.rand(4, device="cuda").sum().item()
    step = Step()
    step()
    expected = step.out.clone()
    torch.cuda.synchronize()
    assert torch.equal(replayed(record(recorder, step), step.out), expected)


def test_replay_equals_eager_and_sees_new_values(recorder):
    step = Step()
    recording = record(recorder, step)
    assert recording.nodes["kernel"] >= 12
    assert recording.num_nodes >= recording.nodes["kernel"]
    for seed in range(3):
        step.x.normal_(generator=torch.Generator("cuda").manual_seed(seed))
        step()
        expected = step.out.clone()
        assert torch.equal(replayed(recording, step.out), expected)


def test_fork_and_join_are_recorded_and_counted(recorder, compute, side):
    step, copied = Step(), torch.zeros(8, 256, device="cuda")

    def work():
        step()
        side.wait_stream(compute)
        with torch.cuda.stream(side):
            copied.copy_(step.out)
        again = step.out * 2
        compute.wait_stream(side)
        step.out.copy_(again + copied)

    recording = record(recorder, work)
    work_nodes = recording.nodes["kernel"] + recording.nodes.get("memcpy", 0)
    assert work_nodes >= 17
    work()
    torch.cuda.synchronize()
    expected = step.out.clone()
    assert torch.equal(replayed(recording, step.out), expected)


def test_memory_sets_and_copies_are_counted_by_kind(recorder):
    block, other = torch.ones(1 << 16, device="cuda"), torch.ones(1 << 16, device="cuda")

    def work():
        block.zero_()
        other.copy_(block)
        other.add_(1)

    nodes = record(recorder, work).nodes
    assert nodes["kernel"] >= 1
    assert sum(nodes.values()) == 3


def test_recordings_share_one_pool(recorder):
    large, small = Step(rows=4096), Step(rows=64)
    first = record(recorder, large)
    second = record(recorder, small)
    assert first.pool_bytes > 0
    assert second.pool_bytes <= 4 << 20
    pool = recorder.pool_by_stream()
    assert set(pool) == {"compute"}
    assert pool["compute"] == first.pool_bytes + second.pool_bytes
    for step, recording in ((large, first), (small, second), (large, first)):
        step()
        expected = step.out.clone()
        assert torch.equal(replayed(recording, step.out), expected)


def fails_by_raising(step, compute, side):
    step()
    raise ValueError("planted")


def fails_by_raising_on_another_stream(step, compute, side):
    step()
    torch.cuda.set_stream(side)
    raise ValueError("planted")


def fails_by_raising_inside_a_fork(step, compute, side):
    side.wait_stream(compute)
    with torch.cuda.stream(side):
        step()
        raise ValueError("planted")


def fails_by_item(step, compute, side):
    step()
    step.out.sum().item()


def fails_by_an_unjoined_stream(step, compute, side):
    side.wait_stream(compute)
    with torch.cuda.stream(side):
        step()


def fails_unseen(step, compute, side):
    try:
        fails_by_item(step, compute, side)
    except RuntimeError:
        return


FAULTS = {
    "raise": (fails_by_raising, ValueError, "planted"),
    "raise elsewhere": (fails_by_raising_on_another_stream, ValueError, "planted"),
    "raise in a fork": (fails_by_raising_inside_a_fork, ValueError, "planted"),
    "item": (fails_by_item, RecordingError, r"host sync while capturing.*\[CUDA error 900"),
    "unjoined": (fails_by_an_unjoined_stream, RecordingError, r"side stream not joined.*\[.* 904"),
    "swallowed": (fails_unseen, RecordingError, r"already made the recording invalid.*\[.* 901"),
}


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("name", FAULTS)
def test_a_failed_recording_leaves_everything_as_it_was(recorder, compute, side, name, collects):
    fault, error, said = FAULTS[name]
    step = Step()
    recorder.warm_up(step)
    was_enabled = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        for _ in range(2):
            with pytest.raises(error, match=said) as caught:
                recorder.record(lambda: fault(step, compute, side))
            assert error is ValueError or isinstance(caught.value.__cause__, RuntimeError)
            assert gc.isenabled() is collects
            with torch.cuda.stream(side):
                assert not torch.cuda.is_current_stream_capturing()
            check_untouched(recorder, compute)
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_collector_rests_while_recording_only(recorder):
    seen, step = [], Step()
    record(recorder, lambda: (seen.append(gc.isenabled()), step()))
    assert seen == [True, False]
    assert gc.isenabled()


def test_current_stream_is_compute_while_recording(recorder, compute):
    seen, step = [], Step()
    record(recorder, lambda: (seen.append(torch.cuda.current_stream()), step()))
    assert seen == [compute, compute]
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def manager(recorder, step, **options):
    return GraphManager(recorder, input_buffers("cuda"), step.out, **options)


def test_kernels_on_an_unforked_stream_are_an_empty_graph(recorder, side):
    step = Step()
    graphs = manager(recorder, step)

    def stray():
        with torch.cuda.stream(side):
            step()

    with pytest.raises(CaptureError, match="invalid: empty, no kernel"):
        graphs.capture(PLAIN, lambda: stray)
    graphs.capture(PLAIN, lambda: step)
    assert torch.isfinite(graphs.replay(graphs.ready(PLAIN, decode(8)))).all()


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_third_of_eight_captures_spares_the_rest(recorder, compute, side, name):
    fault, error, _ = FAULTS[name]
    steps = [Step(rows=64) for _ in range(8)]
    graphs = [manager(recorder, step) for step in steps]
    keys = [decode_key(count) for count in (64, 56, 48, 40, 32, 24, 16, 8)]
    for index, (step, owner, key) in enumerate(zip(steps, graphs, keys, strict=True)):
        if index != 2:
            owner.capture(key, lambda step=step: step)
            continue
        calls = []

        def work(step=step, calls=calls):
            calls.append(1)
            if len(calls) == 2:
                fault(step, compute, side)
            else:
                step()

        with pytest.raises(CaptureError, match=f"capture of {key} failed") as caught:
            owner.capture(key, lambda work=work: work)
        assert isinstance(caught.value.__cause__, error)
    for index, (step, owner, key) in enumerate(zip(steps, graphs, keys, strict=True)):
        if index != 2:
            step()
            expected = step.out[: key.num_tokens].clone()
            assert torch.equal(owner.replay(owner.ready(key, decode(1))), expected)


def test_an_input_that_moved_is_a_replay_error(recorder):
    step = Step()
    graphs = manager(recorder, step, extra_addresses={"weights": lambda: step.w.data_ptr()})
    graphs.capture(PLAIN, lambda: step)
    graphs.replay(graphs.ready(PLAIN, decode(8)))
    kept = step.w
    step.w = kept.clone()
    with pytest.raises(ReplayError, match="weights moved from 0x"):
        graphs.replay(graphs.ready(PLAIN, decode(8)))
    step.w = kept
    graphs.replay(graphs.ready(PLAIN, decode(8)))
    torch.cuda.synchronize()


def test_a_thread_that_copies_pinned_memory_disturbs_no_recording(recorder):
    step = Step()
    step()
    expected = step.out.clone()
    recorder.warm_up(step)
    with pinned_copies() as failures:
        for _ in range(20):
            recording = recorder.record(step)
            recording.instantiate()
            assert torch.equal(replayed(recording, step.out), expected)
            recording.free()
    assert failures == []
    assert set(recorder.pool_by_stream()) == {"compute"}


def test_a_thread_that_enters_records_on_the_compute_stream(recorder, compute):
    step = Step()

    def run():
        with recorder.enter(0):
            assert torch.cuda.current_stream() == compute
            assert torch.is_inference_mode_enabled()
            step()

    def work():
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    recording = record(recorder, work)
    assert recording.nodes["kernel"] >= 12
    step()
    expected = step.out.clone()
    assert torch.equal(replayed(recording, step.out), expected)


def test_instantiate_makes_the_first_replay_as_good_as_any(recorder):
    step = Step()
    recorder.warm_up(step)
    recording = recorder.record(step)
    recording.instantiate()
    step()
    expected = step.out.clone()
    assert torch.equal(replayed(recording, step.out), expected)
    recording.free()
    with pytest.raises(RuntimeError):
        recording.replay()
