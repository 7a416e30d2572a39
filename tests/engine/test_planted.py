"""Faults planted under a whole engine: each its named error, no hang, and nothing left behind."""

import dataclasses
import gc
import re
import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from cgprof.accuracy.parity import ParityChecker
from cgprof.engine.live import make_step
from cgprof.errors import CaptureError, MicrobatchError, RecordingError, ReplayError
from cgprof.graphs.dispatch import eager_key
from tests.support.builders import build_engine, captured_engine, tiny_run
from tests.support.graphs import decode_key
from tests.support.planted import (
    around_pass,
    asks_the_host,
    check_replays,
    in_last_layer,
    leaves_a_fork_open,
    nothing_left_behind,
    raises,
    runs_elsewhere,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)
PLAIN, TWIN = decode_key(6), decode_key(6, num_microbatches=2)
# Eight keys; the third one is put in by the test.
OTHERS = [
    decode_key(8),
    decode_key(4),
    decode_key(2),
    decode_key(8, num_microbatches=2),
    decode_key(1),
    decode_key(4, num_microbatches=2),
    decode_key(5),
]
HOST_WORDS = {
    "cpu": "is not permitted while recording: it needs the host",
    "cuda": "host sync while capturing: an operation waited for the device, such as .item()",
}


def mark_nothing(phase):
    return None


@contextmanager
def engine_on(device, *, dbo=True):
    """An engine with nothing captured; afterwards its threads are gone."""
    threads = set(threading.enumerate())
    engine = build_engine(tiny_run(device=device, dbo=dbo, sizes=(1, 2, 4, 5, 6, 8)))
    try:
        with engine.active():
            yield engine
    finally:
        engine.close()
    assert set(threading.enumerate()) == threads


def capture_eight(engine, faulty, plant, message):
    """Captures eight keys, the third under `plant`; returns that one's error."""
    keys = [*OTHERS[:2], faulty, *OTHERS[2:]]
    with nothing_left_behind(engine):
        for key in keys:
            if key is not faulty:
                engine.capture(key, mark_nothing)
                continue
            words = f"^capture of {key} failed: {message}"
            with plant, pytest.raises(CaptureError, match=words) as caught:
                engine.capture(key, mark_nothing)
            assert caught.value.key == str(key)
    assert list(engine.graphs.keys) == OTHERS
    check_replays(engine)
    engine.capture(faulty, mark_nothing)
    check_replays(engine, faulty)
    return caught.value


@pytest.mark.parametrize("after_passes", [0, 1], ids=["warming", "recording"])
@pytest.mark.parametrize("microbatch", [None, 0, 1])
@on_devices
def test_raise_in_the_third_of_eight_captures_spares_the_rest(device, microbatch, after_passes):
    key = PLAIN if microbatch is None else TWIN
    where = "" if microbatch is None else f"microbatch {microbatch}: "
    with engine_on(device) as engine:
        plant = in_last_layer(engine, raises, microbatch=microbatch, after_passes=after_passes)
        error = capture_eight(engine, key, plant, f"{where}ValueError: planted$")
    if microbatch is None:
        assert isinstance(error.__cause__, ValueError)
    else:
        assert isinstance(error.__cause__, MicrobatchError)
        assert error.__cause__.index == microbatch
        assert isinstance(error.__cause__.__cause__, ValueError)


@pytest.mark.parametrize("microbatch", [None, 0, 1])
@on_devices
def test_host_sync_in_the_third_of_eight_captures_is_named_in_plain_words(device, microbatch):
    key = PLAIN if microbatch is None else TWIN
    where = "" if microbatch is None else f"microbatch {microbatch}: "
    with engine_on(device) as engine:
        plant = in_last_layer(engine, asks_the_host, microbatch=microbatch)
        said = f"{where}.*{re.escape(HOST_WORDS[device])}"
        error = capture_eight(engine, key, plant, said)
    wanted = RecordingError if microbatch is None else MicrobatchError
    assert isinstance(error.__cause__, wanted)
    if microbatch is not None:
        assert error.__cause__.index == microbatch


@on_devices
def test_capture_that_fails_with_its_microbatches_parked_frees_them(device):
    def refuse(work):
        raise ValueError("planted")

    with engine_on(device) as engine:
        with nothing_left_behind(engine), pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.recorder, "record", refuse)
            with pytest.raises(CaptureError, match=f"capture of {TWIN} failed: ValueError: plan"):
                engine.capture(TWIN, mark_nothing)
        engine.capture(TWIN, mark_nothing)
        check_replays(engine)


@on_devices
def test_work_that_ran_elsewhere_leaves_an_empty_graph(device):
    # On a stream that is not captured, CUDA refuses the first memory that the pass takes.
    words = {"cpu": "invalid: empty,", "cuda": "(invalid: empty,|.*outside the recording)"}
    with engine_on(device, dbo=False) as engine:
        with (
            nothing_left_behind(engine),
            around_pass(engine, runs_elsewhere),
            pytest.raises(CaptureError, match=f"capture of {PLAIN} failed: {words[device]}"),
        ):
            engine.capture(PLAIN, mark_nothing)
        engine.capture(PLAIN, mark_nothing)
        check_replays(engine)


def test_part_that_ran_elsewhere_fails_the_replay_leg_when_no_neighbour_shows_it():
    with engine_on("cpu", dbo=False) as engine:
        with in_last_layer(engine, runs_elsewhere):
            engine.capture(PLAIN, mark_nothing)
        results = ParityChecker(engine).check(PLAIN)
        assert results[0].leg == "replay-eager"
        assert results[0].passed is False
        engine.graphs.drop(PLAIN)
        engine.capture(decode_key(8), mark_nothing)
        said = r"the graph has \d+ kernels where FULL-8x8q1 has"
        with in_last_layer(engine, runs_elsewhere), pytest.raises(CaptureError, match=said):
            engine.capture(PLAIN, mark_nothing)


def adds_elsewhere(part, x):
    """Only one harmless kernel: a whole pass would read transfers that a capture does not run."""
    runs_elsewhere(lambda: x.mul(2), x)


@pytest.mark.parametrize("microbatch", [0, 1])
@on_devices
def test_microbatch_that_ran_elsewhere_is_a_count_far_from_the_plain_key(device, microbatch):
    with engine_on(device) as engine:
        plant = around_pass(engine, adds_elsewhere, microbatch=microbatch)
        said = r"the graph has \d+ kernels where 2 x \d+ of "
        capture_eight(engine, TWIN, plant, said)


def test_microbatch_on_a_thread_that_never_entered_is_a_count_far_from_the_plain_key():
    with engine_on("cpu") as engine:
        plant = around_pass(engine, runs_elsewhere, microbatch=1)
        capture_eight(engine, TWIN, plant, r"the graph has \d+ kernels where 2 x \d+ of ")


@pytest.mark.gpu
@pytest.mark.parametrize("key", [PLAIN, TWIN], ids=str)
def test_side_stream_that_is_not_joined_is_named(key):
    with engine_on("cuda") as engine:
        microbatch = 1 if key is TWIN else None
        plant = in_last_layer(engine, leaves_a_fork_open, microbatch=microbatch)
        capture_eight(engine, key, plant, "side stream not joined")


@pytest.mark.gpu
@pytest.mark.parametrize("key", [PLAIN, TWIN], ids=str)
def test_kernel_whose_first_run_is_inside_a_capture_is_refused_by_name(key):
    from tests.support.late_triton import make_late_kernel

    late = make_late_kernel()

    def runs_when_capturing(part, x):
        if torch.cuda.is_current_stream_capturing():
            late[(1,)](x)
        return part()

    with engine_on("cuda") as engine:
        microbatch = 1 if key is TWIN else None
        plant = in_last_layer(engine, runs_when_capturing, microbatch=microbatch)
        where = "" if key is PLAIN else "microbatch 1: "
        said = rf"{where}first run of kernel \S*late_kernel inside capture"
        capture_eight(engine, key, plant, said)
        late[(1,)](torch.zeros(64, device="cuda"))
        engine.graphs.drop(key)
        with in_last_layer(engine, runs_when_capturing, microbatch=microbatch):
            engine.capture(key, mark_nothing)
        check_replays(engine)


@on_devices
def test_input_that_an_allocation_moved_is_named_before_anything_is_launched(device):
    run = tiny_run(device=device, dbo=True)
    with captured_engine(run) as engine:
        for key in engine.graphs.keys:
            step, decision = engine.live_step(key), engine.decision_for(key)
            fields, replays = engine.buffers.device_fields, engine.graphs.captured[key].replays
            for name in ("positions", "block_table", "split_seq_lens"):
                moved = {name: getattr(fields, name).clone()}
                engine.buffers.device_fields = dataclasses.replace(fields, **moved)
                with (
                    nothing_left_behind(engine),
                    pytest.raises(
                        ReplayError, match=f"^replay of {key} refused: {name} moved from 0x"
                    ),
                ):
                    engine.runner.prepare(step, decision)
                engine.buffers.device_fields = fields
            assert engine.graphs.captured[key].replays == replays
        check_replays(engine)


@on_devices
def test_view_that_was_pointed_elsewhere_in_place_is_named(device):
    with captured_engine(tiny_run(device=device)) as engine:
        key = engine.graphs.keys[0]
        step, decision = engine.live_step(key), engine.decision_for(key)
        positions = engine.buffers.device_fields.positions
        at_home = positions.clone()
        at_home.set_(positions)
        positions.set_(positions.clone())
        with pytest.raises(ReplayError, match="positions moved"):
            engine.runner.prepare(step, decision)
        positions.set_(at_home)
        check_replays(engine)


@on_devices
def test_cache_that_was_bound_anew_is_named(device):
    with captured_engine(tiny_run(device=device, dbo=True)) as engine:
        key = engine.graphs.keys[0]
        step, decision = engine.live_step(key), engine.decision_for(key)
        engine.model.bind_cache(engine.kv_cache.clone(), engine.backend)
        with pytest.raises(ReplayError, match="kv_cache moved"):
            engine.runner.prepare(step, decision)
        engine.model.bind_cache(engine.kv_cache, engine.backend)
        check_replays(engine)


@on_devices
def test_replay_of_another_shape_or_an_uncaptured_key_is_refused_by_name(device):
    with captured_engine(tiny_run(device=device, dbo=True)) as engine:
        step = engine.live_step(decode_key(4))
        for key in (decode_key(3), decode_key(7, num_microbatches=2)):
            short = engine.live.step([1] * 3)
            with pytest.raises(ReplayError, match=f"{key} refused: it is not among the"):
                engine.runner.prepare(short, engine.decision_for(key))
        rows, ones = step.rows, np.ones(1, np.int32)
        pairs = make_step(rows[:2], np.full(2, 2, np.int32), num_prefills=0)
        for outside in (pairs, make_step(rows[:1], ones, num_prefills=1)):
            with pytest.raises(ReplayError, match="refused: the batch is outside the key"):
                engine.runner.prepare(outside, engine.decision_for(decode_key(4)))
        with pytest.raises(ReplayError, match="do not fit"):
            engine.runner.prepare(engine.live.step([1] * 5), engine.decision_for(decode_key(4)))
        check_replays(engine)


@pytest.mark.parametrize("microbatch", [0, 1])
@on_devices
def test_raise_in_an_eager_split_names_its_microbatch_and_the_next_steps_are_right(
    device, microbatch
):
    with captured_engine(tiny_run(device=device, dbo=True)) as engine:
        step = engine.live.fill([5, 17, 30], [9, 12, 7], seed=0)
        decision = engine.runner.decide(step)
        assert decision.key == eager_key(28, 2)
        expected = launch(engine, step, decision)
        for _ in range(2):
            with (
                nothing_left_behind(engine),
                in_last_layer(engine, raises, microbatch=microbatch, after_passes=0),
                pytest.raises(MicrobatchError, match=f"^microbatch {microbatch}: ValueError: plan"),
            ):
                launch(engine, step, decision)
            assert torch.equal(launch(engine, step, decision), expected)
        check_replays(engine)


def launch(engine, step, decision):
    prepared = engine.runner.prepare(step, decision)
    hidden = engine.runner.launch(prepared, count=False)
    engine.synchronize()
    return hidden[: step.shape.num_tokens].clone()


def make_cycles(device):
    """Garbage that only the collector frees, with memory of the device in it."""
    for _ in range(2000):
        cycle = [torch.empty(8, device=device)]
        cycle.append(cycle)


@on_devices
def test_captures_amid_cycles_are_valid_and_leave_the_collector_as_it_was(device):
    count = 50 if device == "cuda" else 12
    run = tiny_run(device=device, sizes=tuple(range(1, count + 1)), max_num_seqs=count)
    engine = build_engine(run)
    recording, collections = [False], []

    def note(phase, info):
        collections.append(recording[0])

    def makes_garbage(part, x):
        recording[0] = device == "cuda" and torch.cuda.is_current_stream_capturing()
        for _ in range(3000):
            cycle = []
            cycle.append(cycle)
        recording[0] = False
        return part()

    gc.callbacks.append(note)
    try:
        with engine.active(), nothing_left_behind(engine):
            with in_last_layer(engine, makes_garbage, after_passes=0):
                for index, key in enumerate(engine.plan.keys):
                    make_cycles(device)
                    engine.capture(key, mark_nothing)
                    assert gc.isenabled()
                    if index == count // 2:
                        with (
                            in_last_layer(engine, raises),
                            pytest.raises(CaptureError, match="planted"),
                        ):
                            engine.capture(decode_key(8, query_len=2), mark_nothing)
                        assert gc.isenabled()
            assert len(engine.graphs.keys) == count
            assert collections
            assert not any(collections)
            check_replays(engine)
    finally:
        gc.callbacks.remove(note)
        engine.close()
