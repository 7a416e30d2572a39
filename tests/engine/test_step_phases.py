"""What the phases of a step may not do: wait for the device, allocate, overtake an upload."""

import warnings
from contextlib import contextmanager

import pytest
import torch

from cgprof.accuracy.cases import cases_for
from cgprof.accuracy.parity import ParityChecker
from cgprof.accuracy.stream import check_stream
from cgprof.graphs.dispatch import eager_key
from cgprof.shapes import CapturePolicy
from tests.support.builders import captured_engine, tiny_run

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)


@contextmanager
def waits_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def decisions_of(engine):
    """Every captured key, its eager form, and an eager split of a mixed step."""
    for key in engine.graphs.keys:
        step = engine.live_step(key)
        yield step, engine.decision_for(key)
        yield step, engine.decision_for(key.as_eager())
    engine.live.fill([5, 17, 30], [1, 12, 20], seed=0)
    yield engine.live.step([1, 12, 20]), engine.decision_for(eager_key(33, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("policy", [CapturePolicy.FULL, CapturePolicy.FULL_DECODE_ONLY])
def test_no_phase_waits_for_the_device_and_prepare_allocates_nothing_there(policy, random):
    with captured_engine(tiny_run(policy, device="cuda", dbo=True)) as engine:
        for step, decision in decisions_of(engine):
            engine.table.temperature[:] = 0.7 if random else 0.0
            for _ in range(2):  # kernels are compiled, then steps are watched
                prepared = engine.runner.prepare(step, decision)
                engine.runner.finish(prepared, engine.runner.launch(prepared)).wait()
            with waits_are_errors():
                before = torch.cuda.memory_stats()["allocation.all.allocated"]
                prepared = engine.runner.prepare(step, decision)
                after = torch.cuda.memory_stats()["allocation.all.allocated"]
                tokens = engine.runner.finish(prepared, engine.runner.launch(prepared))
            assert after == before, decision.key
            tokens.wait()
        engine.table.temperature[:] = 0.0


@on_devices
def test_200_steps_without_a_wait_equal_eager(device):
    run = tiny_run(CapturePolicy.FULL, device=device, dbo=True, sizes=(1, 3, 8, 13))
    with captured_engine(run) as engine:
        result = check_stream(engine, engine.graphs.keys, steps=200)
    assert result.passed is True, result
    assert result.replays == 200


@pytest.mark.gpu
def test_staging_slots_are_not_reused_while_the_queue_is_deep():
    """The device sleeps before each of 200 steps, so that the host is ahead all the while."""
    with captured_engine(tiny_run(device="cuda", dbo=True)) as engine:
        launch = engine.runner.launch

        def launch_late(prepared, **options):
            torch.cuda._sleep(2_000_000)
            return launch(prepared, **options)

        engine.runner.launch = launch_late
        result = check_stream(engine, engine.graphs.keys, steps=200)
    assert result.passed is True, result


CONTEXTS = (1, 15, 16, 17, 257)


@on_devices
def test_every_key_is_right_at_every_context_and_two_at_4096_too(device):
    """On a GPU every key sees 4096 as well; both legs, padding poisoned, 8 -> 3 -> 8."""
    run = tiny_run(
        CapturePolicy.FULL,
        device=device,
        dbo=True,
        sizes=(1, 8, 24),
        max_model_len=4352,
        max_num_batched_tokens=512,
    )
    with captured_engine(run) as engine:
        checker = ParityChecker(engine)
        with_long = 0
        for key in engine.graphs.keys:
            results = checker.check(key)
            assert all(result.passed is not False for result in results), (key, results)
            assert results[0].passed is results[1].passed is True
            filling = checker.filling_for(key)
            cases = cases_for(key, filling)
            seen = {filling.contexts[i] for case in cases for i in case.indices}
            assert set(CONTEXTS) <= seen, key
            with_long += 4096 in seen
            if key.num_tokens == key.num_reqs == 8 and not key.is_twin:
                sizes = [len(case.indices) for case in cases if case.kind in ("full", "shrunk")]
                assert sizes[-3:] == [8, 3, 8]
            if key.uniform_query_len is None and key.num_tokens > 2:
                kinds = {case.kind for case in cases}
                assert {"one request", "chunk beside decodes"} <= kinds
        assert with_long == (len(engine.graphs.keys) if device == "cuda" else 2)
