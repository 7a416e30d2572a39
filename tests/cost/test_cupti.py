import shutil

import pytest
import torch

from cgprof.cost.cupti import find_library, graph_launches, loaded_libraries
from tests.support.fake_cupti import LAUNCH, LAUNCH_PTSZ, MALLOC, OVERHEAD, FakeCalls, build

needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture
def library(tmp_path):
    return build(tmp_path)


@needs_cc
def test_launches_are_collected_in_order_over_all_buffers_and_nothing_else_is(library):
    calls = FakeCalls(library)
    calls.call(LAUNCH, 1, 2)
    with graph_launches(library) as trace:
        for begin in (700, 100, 500, 300):
            calls.call(LAUNCH, begin, begin + 10)
        calls.call(MALLOC, 320, 330)
        calls.call(LAUNCH_PTSZ, 900, 950)
        calls.call(LAUNCH, 910, 940, returned=1)
        calls.call(LAUNCH, 915, 920, kind=OVERHEAD)
    calls.call(LAUNCH, 2_000, 3_000)
    assert trace.problem == ""
    assert trace.intervals == ((100, 110), (300, 310), (500, 510), (700, 710), (900, 950))


@needs_cc
def test_leaving_disables_whatever_happens_and_a_second_context_begins_anew(library):
    calls = FakeCalls(library)

    def fail():
        with graph_launches(library):
            assert calls.enabled == 1 << 5
            calls.call(LAUNCH, 10, 20)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert calls.enabled == 0
    with graph_launches(library) as trace:
        calls.call(LAUNCH, 30, 45)
    assert (trace.intervals, calls.enabled) == (((30, 45),), 0)


@needs_cc
def test_refusal_is_a_reason_and_the_block_runs_untraced(library):
    calls = FakeCalls(library)
    calls.refuse()
    with graph_launches(library) as trace:
        calls.call(LAUNCH, 10, 20)
        ran = True
    assert ran
    assert trace.intervals == ()
    assert trace.problem == "cuptiActivityEnable says NO_SECOND_ONE (39)"
    assert calls.times_disabled == 0  # whoever else uses it keeps it on


@needs_cc
@pytest.mark.parametrize(("begin", "end"), [(0, 0), (30, 20)])
def test_launch_without_possible_times_is_a_reason(library, begin, end):
    calls = FakeCalls(library)
    with graph_launches(library) as trace:
        calls.call(LAUNCH, 5, 9)
        calls.call(LAUNCH, begin, end)
    assert trace.problem == "CUPTI recorded a launch without its times"
    assert trace.intervals == ()


@needs_cc
def test_library_without_a_function_is_a_reason_that_names_it(tmp_path):
    path = build(tmp_path, "int cuptiActivityRegisterCallbacks(void) { return 0; }")
    with graph_launches(path) as trace:
        pass
    assert path in trace.problem
    assert "cuptiActivityEnable" in trace.problem


def test_library_that_is_none_is_a_reason(tmp_path):
    (tmp_path / "libcupti.so").write_text("text")
    for name in ("libcupti.so", "absent.so"):
        with graph_launches(str(tmp_path / name)) as trace:
            pass
        assert "cannot be used as CUPTI" in trace.problem


def test_loaded_libraries_are_found_once_each_by_their_file_name(tmp_path):
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r--p 00000000 fd:00 12   /a b/nvidia/cu13/lib/libcupti.so.13\n"
        "7f01-7f02 r-xp 00001000 fd:00 12   /a b/nvidia/cu13/lib/libcupti.so.13\n"
        "7f02-7f03 rw-p 00000000 00:00 0\n"
        "7f03-7f04 r--p 00000000 fd:00 13   /libcupti.so/libother.so\n"
    )
    assert loaded_libraries(maps) == ["/a b/nvidia/cu13/lib/libcupti.so.13"]
    assert loaded_libraries(tmp_path / "absent") == []


def test_toolkit_of_the_environment_is_found(tmp_path, monkeypatch):
    folder = tmp_path / "extras" / "CUPTI" / "lib64"
    folder.mkdir(parents=True)
    (folder / "libcupti.so.13").write_text("")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr("cgprof.cost.cupti._MAPS", tmp_path / "maps")
    assert find_library() == str(folder / "libcupti.so.13")


@pytest.mark.gpu
def test_cupti_of_the_process_sees_each_launch_twice_in_a_row_and_then_nothing():
    from cgprof.graphs.cuda import CudaRecorder

    compute = torch.cuda.Stream()
    x = torch.ones(64, device="cuda")

    def work():
        for _ in range(20):
            x.add_(1)

    recorder = CudaRecorder(compute)
    recorder.warm_up(work)
    recording = recorder.record(work)
    recording.instantiate()
    for count in (3, 5):
        with torch.cuda.stream(compute), graph_launches() as trace:
            for _ in range(count):
                recording.replay()
            compute.synchronize()
        assert trace.problem == ""
        assert len(trace.intervals) == count
        assert all(0 < end - begin < 100_000_000 for begin, end in trace.intervals)
    with torch.cuda.stream(compute):
        recording.replay()
        compute.synchronize()
    with graph_launches() as trace:
        pass
    assert (trace.problem, trace.intervals) == ("", ())
