import pytest

from cgprof.measure.accounting import DeviceReading, graph_memory
from cgprof.measure.neighbours import process_view
from cgprof.measure.warnings import (
    WarningKind,
    bound_by,
    launch_warnings,
    memory_warnings,
    throttle_warnings,
)
from tests.support.records import stage_stats

MIB = 1 << 20
QUIET = stage_stats(50_000)


def _kinds(warnings):
    return [warning.kind for warning in warnings]


def _reading(free_mib, pool_mib=0, other=None):
    listed = [(1, 5 * MIB)] + ([(2, other)] if other is not None else [])
    return DeviceReading(
        free_bytes=free_mib * MIB,
        pool_by_stream={"compute": pool_mib * MIB},
        general_by_stream={},
        processes=process_view(listed, pid=1),
    )


def _memory_warnings(before, after):
    return memory_warnings(graph_memory(before, {}, after), before, after)


def test_launch_warnings_of_quiet_samples_are_none():
    assert launch_warnings(QUIET, stage_stats(5_000), 20_000, 0.03) == []


def test_launch_warnings_name_the_noisy_side_and_what_stopped_it():
    noisy = stage_stats(5_000, noise=0.4, stopped_by="max_samples")
    (warning,) = launch_warnings(QUIET, noisy, 5_000, 0.03)
    assert warning.kind is WarningKind.NOISY
    assert str(warning).startswith("noisy: replay: quartiles 40% of the median apart")
    assert "stopped by max_samples" in str(warning)


def test_launch_warnings_say_when_samples_are_too_few():
    few = stage_stats(50_000, count=3, noise=None)
    (warning,) = launch_warnings(few, stage_stats(5_000), 5_000, 0.03)
    assert "eager: 3 samples are too few" in str(warning)


def test_launch_warnings_flag_a_first_replay_far_above_the_others():
    assert launch_warnings(QUIET, stage_stats(5_000), 50_000, 0.03) == []
    (warning,) = launch_warnings(QUIET, stage_stats(5_000), 50_001, 0.03)
    assert warning.kind is WarningKind.FIRST_REPLAY_DEAR


def test_launch_warnings_flag_a_key_whose_device_time_hides_eager_launching():
    assert launch_warnings(QUIET, stage_stats(5_000, device_ns=49_999), 5_000, 0.03) == []
    found = launch_warnings(QUIET, stage_stats(5_000, device_ns=50_000), 5_000, 0.03)
    assert _kinds(found) == [WarningKind.DEVICE_BOUND]


@pytest.mark.parametrize(
    ("device_ns", "bound"), [(None, None), (49_999, "host"), (50_000, "device"), (9**9, "device")]
)
def test_step_is_bound_by_what_takes_longer_and_by_nothing_known_without_a_device(device_ns, bound):
    assert bound_by(QUIET, stage_stats(5_000, device_ns=device_ns)) == bound


def test_throttle_warnings_join_the_reasons():
    assert throttle_warnings(()) == []
    assert [str(w) for w in throttle_warnings(("a", "b"))] == ["throttled: a, b"]


def test_memory_warnings_of_plain_growth_are_none():
    assert _memory_warnings(_reading(100), _reading(90, pool_mib=8)) == []


def test_memory_warnings_show_a_negative_rest_without_a_sign():
    (warning,) = _memory_warnings(_reading(100), _reading(95, pool_mib=8))
    assert warning.kind is WarningKind.NEGATIVE_REST
    assert "3 MiB" in str(warning)
    assert "-" not in str(warning).removeprefix("negative-rest")


def test_memory_warnings_call_released_memory_no_usage():
    found = _memory_warnings(_reading(100, other=50), _reading(2100, pool_mib=8, other=10))
    assert _kinds(found) == [
        WarningKind.NEIGHBOUR_MOVED,
        WarningKind.NEGATIVE_REST,
        WarningKind.NO_DEVICE_GROWTH,
    ]
    assert "no usage" in str(found[-1])
    assert not any("-1" in str(w) or "-2" in str(w) for w in found)
