"""Whole requests through scheduler, step and sampler: what a client sees."""

import numpy as np
import pytest

from cgprof.batch.request import Request
from cgprof.engine.engine import serve
from cgprof.errors import ConfigError, DeviceError
from cgprof.shapes import CapturePolicy, DecisionReason
from tests.support.builders import captured_engine, tiny_run

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BUDGET = 64


def run_on(device, *args, **fields):
    """On a GPU in a batch-invariant run: a near tie must not depend on the batch."""
    return tiny_run(*args, device=device, batch_invariant=device == "cuda", **fields)


def prompt(seed, length):
    return tuple(np.random.default_rng(seed).integers(0, 128, length).tolist())


def requests():
    """More than there are rows; lengths around the chunk, so that one-token tails occur."""
    lengths = (1, 3, BUDGET - 1, BUDGET, BUDGET + 1, 2 * BUDGET + 1, 16, 17, 5, 40)
    return [
        Request(
            request_id=str(i),
            prompt=prompt(i, length),
            max_new_tokens=6 + i % 3,
            temperature=0.8 * (i % 2),
            seed=i,
        )
        for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_graphs_serve_the_tokens_that_one_request_at_a_time_gets_eagerly(device):
    with captured_engine(run_on(device, CapturePolicy.NONE)) as engine:
        alone = {}
        for request in requests():
            alone.update(serve(engine, [request]))
    with captured_engine(run_on(device, CapturePolicy.FULL, dbo=True)) as engine:
        together = serve(engine, requests())
        reasons = {reason for _, reason in engine.runner.decisions}
    assert together == alone
    assert {len(tokens) for tokens in together.values()} == {6, 7, 8}
    assert DecisionReason.GRAPH in reasons


@pytest.mark.parametrize("device", DEVICES)
def test_equal_prompts_at_once_get_equal_tokens(device):
    asked = [Request(request_id=str(i), prompt=prompt(1, 9), max_new_tokens=24) for i in range(8)]
    with captured_engine(run_on(device, dbo=True)) as engine:
        outputs = serve(engine, asked)
    assert len(set(outputs.values())) == 1
    assert len(outputs) == 8


@pytest.mark.parametrize("device", DEVICES)
def test_seed_decides_random_tokens_and_batch_mates_do_not(device):
    def ask(name, seed):
        return Request(
            request_id=name, prompt=prompt(2, 9), max_new_tokens=24, temperature=1.0, seed=seed
        )

    with captured_engine(run_on(device)) as engine:
        outputs = serve(engine, [ask("a", 1), ask("b", 1), ask("c", 2)])
        again = serve(engine, [ask("alone", 1)])
    assert outputs["a"] == outputs["b"] == again["alone"]
    assert outputs["c"] != outputs["a"]


def test_cache_that_is_too_small_for_all_serves_the_same_tokens():
    with captured_engine(tiny_run(CapturePolicy.NONE)) as engine:
        roomy = serve(engine, requests())
    run = tiny_run(CapturePolicy.NONE, num_gpu_blocks_override=14)
    with captured_engine(run) as engine:
        tight = serve(engine, requests())
        assert engine.scheduler.num_preemptions > 0
        assert engine.pool.num_free == 13
    assert tight == roomy


@pytest.mark.parametrize("mark", [1, 4, 8])
def test_refilling_gives_the_same_tokens_and_starts_prompts_only_below_the_mark(mark):
    with captured_engine(tiny_run(CapturePolicy.NONE)) as engine:
        at_once = serve(engine, requests())
        under_way = []

        def watch(prepared, hidden):
            fresh = engine.table.num_computed[prepared.step.rows] == 0
            if fresh.any():
                under_way.append(len(engine.table.requests) - int(fresh.sum()))
            return engine.runner.finish(prepared, hidden).wait()

        refilled = serve(engine, requests(), choose=watch, refill_below=mark)
    assert refilled == at_once
    assert under_way[0] == 0
    # Rows fill up over several steps of one refilling; only its first one is at the mark.
    assert min(under_way[-2:]) < mark or mark == 8


def test_chosen_tokens_are_what_requests_get():
    with captured_engine(tiny_run()) as engine:

        def sevens(prepared, hidden):
            return np.full(prepared.step.shape.num_reqs, 7, np.int64)

        outputs = serve(engine, requests(), choose=sevens)
    assert {token for tokens in outputs.values() for token in tokens} == {7}


@pytest.mark.parametrize("policy", [CapturePolicy.FULL, CapturePolicy.FULL_DECODE_ONLY])
def test_eager_run_of_the_same_steps_replays_nothing_and_gives_the_same_tokens(policy):
    with captured_engine(tiny_run(policy, dbo=True)) as engine:
        replayed = serve(engine, requests())
        decided = engine.runner.decisions.copy()
        counts = {key: graph.replays for key, graph in engine.graphs.captured.items()}
        engine.runner.decisions.clear()
        eager = serve(engine, requests(), as_eager=True)
        assert counts == {key: graph.replays for key, graph in engine.graphs.captured.items()}
        assert {(k.as_eager(), r): n for (k, r), n in decided.items()} == engine.runner.decisions
    assert eager == replayed
    assert any(key.is_twin for key, _ in decided)


def test_step_that_fails_leaves_no_request_behind():
    with captured_engine(tiny_run()) as engine:
        free, calls = engine.pool.num_free, []

        def fail(prepared, hidden):
            calls.append(prepared)
            if len(calls) == 3:
                raise DeviceError("planted")
            return engine.runner.finish(prepared, hidden).wait()

        with pytest.raises(DeviceError, match="planted"):
            serve(engine, requests(), choose=fail)
        assert not engine.scheduler.has_work
        assert (engine.pool.num_free, engine.table.num_free) == (free, 8)
        assert len(serve(engine, requests())) == len(requests())


def test_one_impossible_request_is_refused_before_any_of_them_starts():
    with captured_engine(tiny_run(CapturePolicy.NONE)) as engine:
        too_long = Request(request_id="x", prompt=prompt(1, 300), max_new_tokens=300)
        with pytest.raises(ConfigError, match="request x"):
            serve(engine, [*requests(), too_long])
        assert not engine.scheduler.has_work
