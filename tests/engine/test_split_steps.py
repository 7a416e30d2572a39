"""Microbatched steps through a whole engine: twins, eager splits, refused twins, any number."""

import numpy as np
import pytest
import torch

from cgprof.accuracy.parity import ParityChecker
from cgprof.accuracy.stream import check_stream
from cgprof.batch.request import Request
from cgprof.config.schema import TwinPolicy
from cgprof.engine.engine import serve
from cgprof.engine.live import make_step
from cgprof.graphs.dispatch import eager_key
from cgprof.microbatch.split import cut
from cgprof.shapes import CapturePolicy, DecisionReason
from tests.support.builders import captured_engine, tiny_run
from tests.support.graphs import decode_key
from tests.support.nearness import References, run_step

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)


def split_run(policy=CapturePolicy.FULL_DECODE_ONLY, *, microbatch=None, **options):
    """In a batch-invariant run on a GPU, so that split and unsplit must be equal bit by bit."""
    on_gpu = options.get("device") == "cuda"
    run = tiny_run(policy, dbo=True, batch_invariant=on_gpu, **options)
    changed = run.microbatch.model_copy(update=microbatch or {})
    return run.model_copy(update={"microbatch": changed})


@pytest.mark.parametrize("count", [3, 4])
@on_devices
def test_twins_of_more_than_two_microbatches_pass_all_legs_and_a_stream(device, count):
    run = split_run(device=device, sizes=(1, 4, 7, 8), microbatch={"num_microbatches": count})
    with captured_engine(run) as engine:
        twins = engine.plan.twins
        assert {key.num_tokens for key in twins} == {4, 7, 8}
        assert {key.num_microbatches for key in twins} == {count}
        checker = ParityChecker(engine)
        for key in twins:
            results = checker.check(key)
            assert all(result.passed is not False for result in results), results
            assert results[0].passed is results[1].passed is True
        assert check_stream(engine, engine.graphs.keys, steps=40).passed is True


STEPS = {
    "prefill": ([0, 0, 40], [7, 16, 9]),
    "prefills after contexts": ([5, 17, 250], [20, 4, 33]),
    "mixed": ([1, 15, 16, 17, 257, 30, 0], [1, 1, 1, 1, 1, 26, 10]),
    "one request": ([31], [29]),
}


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", STEPS)
@on_devices
def test_eager_split_equals_the_unsplit_step_and_the_reference(device, name, count):
    contexts, lens = STEPS[name]
    run = split_run(
        CapturePolicy.NONE, device=device, microbatch={"num_microbatches": count}, sizes=None
    )
    with captured_engine(run) as engine:
        engine.live.fill(contexts, lens, seed=3)
        prefills = sum(length > 1 for length in lens)
        step = make_step(engine.live.step(lens).rows, np.array(lens, np.int32), prefills)
        tokens = sum(lens)
        decision = engine.runner.decide(step)
        assert decision.key == eager_key(tokens, count)
        parts = cut(step.query_lens, decision.key, len(lens))
        straddling = sum(p.req_slice.stop - p.req_slice.start for p in parts) - len(lens)
        assert straddling > 0
        split = run_step(engine, step, decision)
        whole = run_step(engine, step, engine.decision_for(eager_key(tokens)))
        references = References(engine)
        references.check(step, split)
        references.check(step, whole)
        assert engine.runner.decisions[decision.key, DecisionReason.NO_FIT] == 1
        if device == "cuda":
            assert torch.equal(split, whole)


def decode_step(engine, count):
    return engine.live.step([1] * count)


POLICIES = [
    # policy, sizes, requests -> the key that must run, and why
    (TwinPolicy.BOTH, (2, 8), 4, decode_key(8), DecisionReason.EMPTY_MICROBATCH),
    (TwinPolicy.BOTH, (2, 8), 5, decode_key(8, num_microbatches=2), DecisionReason.GRAPH),
    (TwinPolicy.BOTH, (2, 8), 3, decode_key(8), DecisionReason.GRAPH),
    (TwinPolicy.TWIN_ONLY, (2, 8), 4, eager_key(4), DecisionReason.EMPTY_MICROBATCH),
    (TwinPolicy.TWIN_ONLY, (2, 8), 5, decode_key(8, num_microbatches=2), DecisionReason.GRAPH),
    (TwinPolicy.TWIN_ONLY, (2, 8), 3, eager_key(3), DecisionReason.NO_FIT),
    (TwinPolicy.TWIN_ONLY, (2, 8), 2, decode_key(2), DecisionReason.GRAPH),
    (TwinPolicy.BAND, (2, 8, 20), 4, decode_key(8), DecisionReason.EMPTY_MICROBATCH),
    (TwinPolicy.BAND, (2, 8, 20), 10, eager_key(10), DecisionReason.EMPTY_MICROBATCH),
    (TwinPolicy.BAND, (2, 8, 20), 11, decode_key(20, num_microbatches=2), DecisionReason.GRAPH),
]


@pytest.mark.parametrize("policy", TwinPolicy)
@on_devices
def test_each_twin_policy_runs_what_it_captured_and_every_step_is_right(device, policy):
    cases = [case[1:] for case in POLICIES if case[0] is policy]
    run = split_run(device=device, sizes=cases[0][0], microbatch={"twins": policy}, max_num_seqs=20)
    with captured_engine(run) as engine:
        engine.live.fill([1, 15, 16, 17, 40] * 4, [1] * 20, seed=1)
        references = References(engine)
        for _, count, key, reason in cases:
            step = decode_step(engine, count)
            decision = engine.runner.decide(step)
            assert (decision.key, decision.reason) == (key, reason), count
            references.check(step, run_step(engine, step, decision))
            assert engine.runner.decisions[key, reason] == 1


@pytest.mark.parametrize("policy", TwinPolicy)
@on_devices
def test_requests_get_the_same_tokens_under_every_twin_policy(device, policy):
    """Eight requests decode together, later four: a twin that serves, and one that is refused."""
    rng = np.random.default_rng(0)
    asked = [
        Request(
            request_id=str(i),
            prompt=tuple(rng.integers(0, 128, 3 + 5 * i).tolist()),
            max_new_tokens=14 if i < 4 else 4,
        )
        for i in range(8)
    ]
    with captured_engine(split_run(CapturePolicy.NONE, device=device, sizes=None)) as engine:
        expected = serve(engine, asked)
    run = split_run(device=device, sizes=(2, 8), microbatch={"twins": policy})
    with captured_engine(run) as engine:
        assert serve(engine, asked) == expected
        reasons = {reason for _, reason in engine.runner.decisions}
        assert DecisionReason.EMPTY_MICROBATCH in reasons
        assert any(key.is_twin for key, _ in engine.runner.decisions)
