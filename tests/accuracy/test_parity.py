"""Each planted fault must turn its leg red; without one every leg is green."""

import pytest

from cgprof.accuracy.cases import cases_for
from cgprof.accuracy.parity import ParityChecker
from cgprof.accuracy.stream import check_stream
from cgprof.shapes import CapturePolicy, GraphKey, RuntimeMode
from tests.support.builders import captured_engine, tiny_run

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
REPLAY, REFERENCE, PADDING = "replay-eager", "step-reference", "poisoned-padding"
PLAIN = GraphKey(mode=RuntimeMode.FULL, num_tokens=8, num_reqs=8, uniform_query_len=1)
TWIN = GraphKey(
    mode=RuntimeMode.FULL, num_tokens=8, num_reqs=8, uniform_query_len=1, num_microbatches=2
)


@pytest.fixture(scope="module", params=DEVICES)
def engine(request):
    run = tiny_run(dbo=True, device=request.param, batch_invariant=request.param == "cuda")
    with captured_engine(run) as engine:
        yield engine


@pytest.fixture(scope="module", params=DEVICES)
def mixed_engine(request):
    run = tiny_run(CapturePolicy.FULL, dbo=True, device=request.param, sizes=(1, 2, 5, 8, 13, 48))
    with captured_engine(run) as engine:
        yield engine


def failed(results):
    return {result.leg for result in results if result.passed is False}


def check(engine, key):
    return ParityChecker(engine).check(key)


def only_in_checked_steps(engine, monkeypatch, method, after):
    """Runs `after(host, step)` behind a writing method, but not while contexts are computed."""
    runner, inputs = engine.runner, engine.runner.inputs
    prepare, write = runner.prepare, getattr(inputs, method)
    state = {"checked": False}

    def prepare_and_note(step, decision, *args):
        state["checked"] = decision.key.num_reqs is not None
        return prepare(step, decision, *args)

    def write_and_spoil(host, step, *args):
        written = write(host, step, *args)
        if state["checked"]:
            after(host, step)
        return written

    monkeypatch.setattr(runner, "prepare", prepare_and_note)
    monkeypatch.setattr(inputs, method, write_and_spoil)


def test_all_legs_pass_for_decode_keys_and_twins(engine):
    checker = ParityChecker(engine)
    for key in engine.graphs.keys:
        results = checker.check(key)
        assert [result.leg for result in results] == [REPLAY, REFERENCE, PADDING]
        assert results[0].passed is True, results[0]
        assert results[1].passed is True, results[1]
        padded = any(case.is_padded(key) for case in cases_for(key, checker.filling_for(key)))
        assert results[2].passed is (True if padded else None), results[2]
        assert results[0].replays >= 4
        assert results[0].tokens_compared > 0
        assert results[1].floor is not None


def test_all_legs_pass_for_keys_of_any_mix(mixed_engine):
    checker = ParityChecker(mixed_engine)
    for key in mixed_engine.graphs.keys:
        results = checker.check(key)
        assert not failed(results), results
        assert results[0].passed is True
        assert results[1].passed is True
        if key.uniform_query_len is None and key.num_tokens > 2:
            assert {case.split(":")[0] for case in results[0].cases} == {
                "full",
                "one request",
                "chunk beside decodes",
                "shrunk",
            }


def test_uncaptured_key_has_no_verdict(engine):
    results = check(engine, GraphKey(mode=RuntimeMode.FULL, num_tokens=7, num_reqs=7))
    assert [result.passed for result in results] == [None] * 3
    assert all("not captured" in result.note for result in results)
    assert [result.replays for result in results] == [0] * 3


def test_replay_that_does_nothing_fails_the_replay_leg(engine, monkeypatch):
    launch = engine.runner.launch

    def skip(prepared, **options):
        key = prepared.decision.key
        if key.mode is RuntimeMode.FULL:
            return engine.output[: key.num_tokens]
        return launch(prepared, **options)

    monkeypatch.setattr(engine.runner, "launch", skip)
    assert REPLAY in failed(check(engine, PLAIN))


def test_length_short_by_one_fails_the_reference_leg(engine, monkeypatch):
    def shorten(host, step):
        lens = host.seq_lens[: step.shape.num_reqs]
        lens[lens > 1] -= 1

    only_in_checked_steps(engine, monkeypatch, "_write_requests", shorten)
    assert REFERENCE in failed(check(engine, PLAIN))


def test_padding_that_writes_to_another_request_fails_the_padding_leg(engine, monkeypatch):
    def write(host, step):
        others = set(engine.table.requests) - set(step.rows.tolist())
        if others:
            block = int(engine.block_table.array[min(others), 0])
            slot = block * engine.config.limits.block_size
            host.slot_mapping[step.shape.num_tokens : PLAIN.num_tokens] = slot

    only_in_checked_steps(engine, monkeypatch, "_write_tokens", write)
    assert PADDING in failed(check(engine, PLAIN))
    monkeypatch.undo()
    assert not failed(check(engine, PLAIN))


def test_padding_that_reaches_a_real_row_fails_the_padding_leg(engine, monkeypatch):
    forward = engine.model.forward

    def leak(context, out):
        forward(context, out)
        out += out[-1] * context.batch.is_padding[-1]

    engine.graphs.drop(PLAIN)
    monkeypatch.setattr(engine.model, "forward", leak)
    engine.capture(PLAIN, lambda phase: None)
    results = check(engine, PLAIN)
    monkeypatch.undo()
    engine.graphs.drop(PLAIN)
    engine.capture(PLAIN, lambda phase: None)
    assert PADDING in failed(results)
    assert REPLAY not in failed(results)
    assert not failed(check(engine, PLAIN))


@pytest.mark.gpu
def test_twin_that_is_not_the_unsplit_batch_fails_the_reference_leg(monkeypatch):
    run = ParityChecker.run

    def one_bit_off(self, key, step, *args):
        outcome = run(self, key, step, *args)
        if key.mode is RuntimeMode.NONE and key.num_microbatches == 1:
            outcome.hidden[-1] *= 1 + 2.0**-23
        return outcome

    monkeypatch.setattr(ParityChecker, "run", one_bit_off)
    with captured_engine(tiny_run(dbo=True, device="cuda", batch_invariant=True)) as engine:
        results = check(engine, TWIN)
    assert failed(results) == {REFERENCE}
    assert "differ from the unsplit batch" in results[1].note


def test_stream_of_steps_without_a_wait_equals_eager(engine):
    result = check_stream(engine, engine.graphs.keys, steps=60)
    assert result.passed is True
    assert result.replays == 60
    assert len(result.cases) == len(engine.graphs.keys)


@pytest.mark.gpu
def test_long_stream_of_steps_without_a_wait_equals_eager(mixed_engine):
    result = check_stream(mixed_engine, mixed_engine.graphs.keys)
    assert result.passed is True
    assert result.replays == 200


def test_stream_sees_inputs_of_a_later_step(engine, monkeypatch):
    """One step of many that runs with the inputs of the step before it."""
    upload, count = engine.buffers.commit, {"steps": 0}

    def skip_one(num_rows, keep):
        count["steps"] += 1
        if count["steps"] != 20:
            upload(num_rows, keep)

    ParityChecker(engine).fill(ParityChecker(engine).filling_for(PLAIN))
    monkeypatch.setattr(engine.buffers, "commit", skip_one)
    assert check_stream(engine, [PLAIN], steps=30).passed is False


def test_stream_of_nothing_has_no_verdict(engine):
    assert check_stream(engine, ()).passed is None
