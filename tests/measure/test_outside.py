import pytest
import torch
from torch.profiler import record_function

from cgprof.measure.outside import GRAPH, count_launches, count_outside, trace_launches
from tests.support.builders import captured_engine, tiny_run
from tests.support.runs import cuda_graph, failed_graph


def test_count_launches_takes_calls_that_enqueue_and_nothing_else():
    names = [
        *("cudaLaunchKernel", "cuLaunchKernelEx", "cudaLaunchKernelExC", "cudaGraphLaunch"),
        *("cudaMemcpyAsync", "cudaMemsetAsync", "cudaStreamSynchronize", "cudaEventRecord"),
        *("aten::copy_", "Memcpy HtoD (Pinned -> Device)", "void at::native::fill<float>"),
    ]
    assert count_launches(names) == {GRAPH: 1, "kernel": 3, "memcpy": 1, "memset": 1}
    assert count_launches([]) == {}


def test_trace_gives_each_step_the_calls_between_its_begin_and_end():
    """Without a device, spans of the profiler that have the names of calls stand for them."""

    def step(*names):
        def run():
            for name in names:
                with record_function(name):
                    torch.ones(2).add_(1)

        return run

    steps = [step("cudaGraphLaunch"), step(), step("cudaMemcpyAsync", "cudaGraphLaunch")]
    assert trace_launches(steps) == [{GRAPH: 1}, {}, {GRAPH: 1, "memcpy": 1}]


def test_count_outside_of_a_tape_changes_nothing():
    with captured_engine(tiny_run(sizes=(2,))) as engine:
        records = [cuda_graph(key) for key in engine.graphs.keys]
        assert count_outside(engine, records) == records


@pytest.mark.gpu
def test_replay_of_three_kernels_is_one_launch_and_the_rest_is_outside():
    from cgprof.graphs.cuda import CudaRecorder

    compute = torch.cuda.Stream()
    x, source = torch.ones(64, device="cuda"), torch.ones(64).pin_memory()

    def work():
        x.mul_(2)
        x.add_(1)
        x.relu_()

    recorder = CudaRecorder(compute)
    recorder.warm_up(work)
    recording = recorder.record(work)
    recording.instantiate()
    assert dict(recording.nodes) == {"kernel": 3}

    def step():
        x.copy_(source, non_blocking=True)
        recording.replay()
        x.neg_()
        x.abs_()
        compute.synchronize()

    with torch.cuda.stream(compute):
        bare, whole = trace_launches([lambda: (recording.replay(), compute.synchronize()), step])
    assert bare == {GRAPH: 1}
    assert whole == {GRAPH: 1, "kernel": 2, "memcpy": 1}


@pytest.mark.gpu
def test_count_outside_of_a_run_lists_inputs_and_sampling_and_spares_failed_keys():
    with captured_engine(tiny_run(device="cuda", sizes=(2, 8), dbo=True)) as engine:
        keys = engine.graphs.keys
        for key in keys:  # the first replay poisons its rows before
            step, decision = engine.live_step(key), engine.decision_for(key)
            engine.runner.launch(engine.runner.prepare(step, decision))
        before = [engine.graphs.captured[key].replays for key in keys]
        failed = failed_graph(keys[0])
        *counted, untouched = count_outside(engine, [*(cuda_graph(key) for key in keys), failed])
        after = [engine.graphs.captured[key].replays for key in keys]
    assert untouched == failed
    assert [n - m for n, m in zip(after, before, strict=True)] == [1] * len(keys)
    for record in counted:
        assert record.launches_outside == {GRAPH: 1, "memcpy": 2}


@pytest.mark.gpu
def test_count_outside_lists_the_operators_of_logits_and_tokens_where_no_graph_has_them():
    run = tiny_run(device="cuda", sizes=(2,))
    capture = run.capture.model_copy(update={"finish_graphs": False})
    with captured_engine(run.model_copy(update={"capture": capture})) as engine:
        (key,) = engine.graphs.keys
        engine.runner.prepare(engine.live_step(key), engine.decision_for(key))
        (counted,) = count_outside(engine, [cuda_graph(key)])
    assert GRAPH not in counted.launches_outside
    assert counted.launches_outside["kernel"] >= 2
