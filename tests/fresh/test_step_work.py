import pytest

from cgprof.fresh.eager_work import difference, graph_work
from cgprof.fresh.step_work import count_work, eager_step_work
from cgprof.graphs.topology import contents
from cgprof.shapes import CapturePolicy
from tests.support.builders import captured_engine, tiny_run

MANGLED = "_ZN2at6native4fillEi"


def test_activities_of_the_device_are_counted_and_calls_of_the_host_are_not():
    events = [
        {"ph": "M", "name": "process_name"},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel"},
        {"cat": "kernel", "name": "_gate_up_kernel"},
        {"cat": "kernel", "name": "_gate_up_kernel"},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)"},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)"},
        {"cat": "gpu_memset", "name": "Memset (Device)"},
        {"cat": "gpu_user_annotation", "name": "a range"},
        {"cat": "ac2g", "name": "ac2g"},
    ]
    assert count_work(events) == {"_gate_up_kernel": 2, "memcpy": 2, "memset": 1}


def test_names_that_the_profiler_leaves_mangled_join_those_in_words():
    events = [{"cat": "kernel", "name": name} for name in (MANGLED, "at::native::fill(int)")]
    assert count_work(events) == {"at::native::fill(int)": 2}


@pytest.mark.parametrize("policy", [CapturePolicy.FULL, CapturePolicy.FULL_DECODE_ONLY])
def test_eager_steps_of_all_keys_run_the_operators_of_their_graphs(policy):
    with captured_engine(tiny_run(policy, sizes=(8,), dbo=True)) as engine:
        keys = engine.plan.keys
        assert {key.is_twin for key in keys} == {True, False}
        for key in keys:
            graph = contents(engine.graphs.captured[key].recording.read_nodes())
            found = difference(graph_work(graph), eager_step_work(engine, key))
            assert found.equal, (key, found)
        assert not engine.runner.decisions


def test_eager_step_of_a_twin_runs_other_work_than_that_of_its_plain_key():
    with captured_engine(tiny_run(sizes=(8,), dbo=True)) as engine:
        plain, twin = engine.plan.keys
        graph = contents(engine.graphs.captured[plain].recording.read_nodes())
        found = difference(graph_work(graph), eager_step_work(engine, twin))
    assert found.missing
