"""What fresh processes find, with the real engine in them."""

import pytest

from cgprof.config.load import load_run
from cgprof.fresh.eager_work import compare_work
from cgprof.fresh.start import FreshTask, measure_alone, run_fresh
from cgprof.fresh.work import do
from cgprof.graphs.topology import contents
from cgprof.shapes import CapturePolicy
from tests.support.builders import captured_engine, tiny_model, tiny_run

STEP = 2 * 1024**2


def tiny_moe():
    flags = {
        "capture.sizes": [4],
        "capture.policy": "full-decode-only",
        "limits.max_num_seqs": 4,
        "limits.max_num_batched_tokens": 64,
        "limits.max_model_len": 128,
        "microbatch.enabled": True,
        "microbatch.decode_token_threshold": 4,
        "measure.context_len": 8,
        "measure.device": "cpu",
    }
    return load_run(None, "tiny-moe", flags)


def graphs_of(engine):
    return {
        str(key): contents(graph.recording.read_nodes())
        for key, graph in engine.graphs.captured.items()
    }


@pytest.mark.slow
def test_key_alone_in_a_process_of_its_own_holds_the_arena_that_it_needs():
    run, model = tiny_moe()
    with captured_engine(run, model) as engine:
        twin = engine.plan.twins[0]
        nodes = engine.graphs.captured[twin].recording.num_nodes
        shared = engine.recorder.arena.num_bytes
    found = measure_alone(run, model, twin, timeout_s=100)
    assert found.failure is None
    assert found.key == twin
    assert found.nodes == nodes
    assert 0 < found.total_bytes <= shared
    assert found.driver_bytes is None


@pytest.mark.slow
def test_eager_steps_in_a_process_of_their_own_do_the_work_of_the_graphs():
    run, model = tiny_moe()
    with captured_engine(run, model) as engine:
        graphs = graphs_of(engine)
        keys = engine.plan.keys
    task = FreshTask(kind="eager-work", run=run, model=model, keys=keys)
    answer = run_fresh(task, timeout_s=100)
    found = compare_work(graphs, answer)
    assert len(found) == 2
    assert all(one.equal for one in found.values()), found


def test_error_that_a_user_can_act_on_is_the_failure(tmp_path):
    run, model = tiny_moe()
    model = model.model_copy(update={"weights": "none", "directory": str(tmp_path)})
    answer = do(FreshTask(kind="eager-work", run=run, model=model, keys=()))
    assert str(tmp_path) in answer.failure


@pytest.mark.gpu
@pytest.mark.slow
def test_key_alone_on_a_gpu_holds_memory_that_is_all_in_its_parts():
    run, model = tiny_run(sizes=(2, 8), dbo=True, device="cuda"), tiny_model(num_layers=8)
    with captured_engine(run, model) as engine:
        keys = engine.plan.keys
        nodes = [engine.graphs.captured[key].recording.num_nodes for key in keys]
    for key, count in zip(keys, nodes, strict=True):
        found = measure_alone(run, model, key, timeout_s=200)
        assert found.failure is None
        assert found.nodes == count
        assert found.witness.device_delta_bytes > 0
        assert found.memory.pool_bytes > 0
        assert abs(found.memory.rest_bytes) <= STEP
        assert found.driver_bytes is not None


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("policy", [CapturePolicy.FULL, CapturePolicy.FULL_DECODE_ONLY])
def test_eager_steps_on_a_gpu_run_the_kernels_of_the_graphs(policy):
    run = tiny_run(policy, sizes=(2, 8), dbo=True, device="cuda")
    model = tiny_model(dtype="bfloat16")
    with captured_engine(run, model) as engine:
        graphs = graphs_of(engine)
        keys = engine.plan.keys
    assert {key.is_twin for key in keys} == {True, False}
    task = FreshTask(kind="eager-work", run=run, model=model, keys=keys)
    answer = run_fresh(task, timeout_s=200)
    assert answer.failure is None
    assert not answer.problems
    found = compare_work(graphs, answer)
    assert all(one.equal for one in found.values()), found
