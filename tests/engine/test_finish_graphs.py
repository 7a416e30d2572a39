"""The finish of greedy decode steps as graphs: the operators' tokens, and only where it may."""

import pytest
import torch

from cgprof.errors import DeviceError, RecordingError
from cgprof.shapes import CapturePolicy, RuntimeMode
from tests.support.builders import captured_engine, tiny_run
from tests.support.graphs import decode_key

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)


def run_step(engine, step, decision):
    """The tokens of a step, those that its operators choose, and whether a graph chose."""
    replayed = []
    chosen = engine.finish_graphs.replay

    def watched(num_reqs):
        tokens = chosen(num_reqs)
        replayed.append(tokens is not None)
        return tokens

    engine.finish_graphs.replay = watched
    try:
        prepared = engine.runner.prepare(step, decision)
        hidden = engine.runner.launch(prepared)
        tokens = engine.runner.finish(prepared, hidden).wait().copy()
    finally:
        del engine.finish_graphs.replay
    wanted = engine.runner._choose(prepared, hidden)[: step.shape.num_reqs]
    return tokens.tolist(), wanted.tolist(), any(replayed)


@on_devices
@pytest.mark.parametrize("policy", [CapturePolicy.FULL, CapturePolicy.FULL_DECODE_ONLY])
def test_tokens_of_every_key_are_those_of_the_operators(policy, device):
    with captured_engine(tiny_run(policy, device=device, dbo=True, sizes=(1, 3, 8, 13))) as engine:
        seen = set()
        for key in engine.graphs.keys:
            for context in (1, 33):
                engine.live.fill([context] * key.num_reqs, [1] * key.num_reqs, seed=context)
                step = engine.live.step([1] * key.num_reqs)
                tokens, wanted, by_graph = run_step(engine, step, engine.decision_for(key))
                assert tokens == wanted, key
                assert by_graph
                seen.add(tuple(tokens))
        assert len(seen) > 4


@on_devices
def test_a_smaller_batch_takes_its_own_rows_of_a_larger_graph(device):
    with captured_engine(tiny_run(device=device, sizes=(4, 8))) as engine:
        engine.live.fill([9, 5, 30, 21, 2, 7], [1] * 6, seed=1)
        step = engine.live.step([1] * 6)
        whole = engine.live.step([1] * 6)
        for real, taken in ((6, whole), (5, engine.live.step([1] * 5))):
            tokens, wanted, by_graph = run_step(engine, taken, engine.runner.decide(taken))
            assert by_graph
            assert tokens == wanted
            assert len(tokens) == real
        assert engine.runner.decide(step).key == decode_key(8)


@on_devices
def test_other_steps_are_finished_operator_by_operator(device):
    run = tiny_run(CapturePolicy.FULL, device=device, sizes=(4, 8))
    with captured_engine(run) as engine:
        engine.live.fill([9, 5, 30, 21], [1] * 4, seed=1)
        step = engine.live.step([1] * 4)
        decision = engine.runner.decide(step)
        assert decision.key.mode is RuntimeMode.FULL
        eager = engine.decision_for(decision.key.as_eager())
        assert run_step(engine, step, eager)[2] is False
        assert run_step(engine, step, decision)[2] is True
        engine.table.temperature[step.rows[1]] = 0.7
        tokens, wanted, by_graph = run_step(engine, step, decision)
        assert (tokens, by_graph) == (wanted, False)
        engine.table.temperature[:] = 0
        engine.live.fill([9, 5], [3, 1], seed=1)
        mixed = engine.live.step([3, 1])
        tokens, wanted, by_graph = run_step(engine, mixed, engine.runner.decide(mixed))
        assert (tokens, by_graph) == (wanted, False)


def without_finish_graphs(run):
    capture = run.capture.model_copy(update={"finish_graphs": False})
    return run.model_copy(update={"capture": capture})


@on_devices
def test_a_setting_leaves_them_out(device):
    with captured_engine(without_finish_graphs(tiny_run(device=device, sizes=(4,)))) as engine:
        step, decision = engine.live_step(decode_key(4)), engine.decision_for(decode_key(4))
        tokens, wanted, by_graph = run_step(engine, step, decision)
        assert (tokens, by_graph) == (wanted, False)


@pytest.mark.parametrize(
    ("error", "way_out"),
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nTried"), "--gpu-memory-utilization"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), "--gpu-memory-utilization"),
        (RecordingError("host sync while capturing"), "--set capture.finish_graphs=false"),
    ],
)
def test_one_that_cannot_be_captured_is_an_error_that_says_what_to_do(monkeypatch, error, way_out):
    def scores(self, hidden):
        raise error

    monkeypatch.setattr("cgprof.models.decoder.Decoder.scores", scores)
    with pytest.raises(DeviceError) as caught, captured_engine(tiny_run(sizes=(4, 8))):
        pass
    told = str(caught.value)
    assert "logits and tokens of 8 requests" in told
    assert str(error).split()[-1] in told
    assert told.endswith(way_out)
    assert "\n" not in told


def test_a_bug_in_their_work_stays_what_it_is(monkeypatch):
    def scores(self, hidden):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr("cgprof.models.decoder.Decoder.scores", scores)
    with (
        pytest.raises(RuntimeError, match=r"^mat1 and mat2"),
        captured_engine(tiny_run(sizes=(4, 8))),
    ):
        pass


def test_they_are_free_when_the_engine_is_closed():
    with captured_engine(tiny_run(sizes=(4,))) as engine:
        assert engine.finish_graphs.replay(4) is not None
        assert engine.finish_graphs.replay(3) is None
    assert engine.finish_graphs.replay(4) is None


@pytest.mark.gpu
def test_their_memory_is_told_and_not_that_of_any_key():
    pools, told = [], []
    for change in (without_finish_graphs, lambda run: run):
        with captured_engine(change(tiny_run(device="cuda", sizes=(4, 8)))) as engine:
            pools.append([graph.recording.pool_bytes for graph in engine.graphs.captured.values()])
            told.append(engine.finish_graphs.device_bytes)
    assert pools[0] == pools[1]
    assert told[0] is None
    assert told[1] > 0
