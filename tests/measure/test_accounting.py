import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgprof.measure.accounting import (
    INSTANTIATED,
    RECORDED,
    WARMED_UP,
    DeviceReading,
    graph_memory,
    growth,
    neighbour_moved,
    witness,
)
from cgprof.measure.neighbours import process_view, unknown_view

MIB = 1 << 20


def _reading(free, pool=0, general=0, processes=None):
    return DeviceReading(
        free_bytes=free * MIB,
        pool_by_stream={"compute": pool * MIB} if pool else {},
        general_by_stream={"compute": general * MIB},
        processes=processes,
    )


def _processes(own, *others):
    return process_view([(1, own), *enumerate(others, start=2)], pid=1)


def test_graph_memory_finds_each_part_in_its_own_span():
    before = _reading(1000, general=100)
    marks = {
        WARMED_UP: _reading(968, general=132),  # a workspace of 32
        RECORDED: _reading(948, pool=20, general=132),  # a pool segment of 20
        INSTANTIATED: _reading(941, pool=20, general=132),  # 7 in the driver
    }
    after = _reading(938, pool=20, general=132)  # and 3 that nothing explains
    memory = graph_memory(before, marks, after)
    assert memory.pool_by_stream == {"compute": 20 * MIB}
    assert memory.workspaces == {"compute": 32 * MIB}
    assert memory.instantiate_bytes == 7 * MIB
    assert memory.rest_bytes == 3 * MIB


def test_graph_memory_leaves_allocator_growth_out_of_instantiate():
    before = _reading(1000)
    marks = {
        WARMED_UP: before,
        RECORDED: before,
        INSTANTIATED: _reading(980, pool=16),
    }
    assert graph_memory(before, marks, marks[INSTANTIATED]).instantiate_bytes == 4 * MIB


def test_graph_memory_without_marks_computes_no_part_as_a_remainder():
    memory = graph_memory(_reading(1000), {}, _reading(990, pool=6))
    assert memory.instantiate_bytes is None
    assert memory.workspaces == {}
    assert memory.rest_bytes == 4 * MIB


_mib = st.integers(0, 500)
_readings = st.builds(_reading, free=_mib, pool=_mib, general=_mib)


@given(st.lists(_readings, min_size=5, max_size=5))
def test_graph_memory_parts_and_rest_sum_to_the_device_delta(readings):
    before, warmed, recorded, instantiated, after = readings
    marks = {WARMED_UP: warmed, RECORDED: recorded, INSTANTIATED: instantiated}
    memory = graph_memory(before, marks, after)
    parts = memory.pool_bytes + sum(memory.workspaces.values()) + memory.instantiate_bytes
    assert parts + memory.rest_bytes == witness(before, after).device_delta_bytes


def test_growth_lists_only_streams_that_changed():
    before = {"compute": 5, "communication": 7, "default": 3}
    after = {"compute": 9, "communication": 7, "stream 0x5": 2}
    assert growth(before, after) == {"compute": 4, "default": -3, "stream 0x5": 2}


def test_witness_gives_three_views_of_usage_as_before_minus_after():
    before = _reading(1000, general=10, processes=_processes(50 * MIB))
    after = _reading(900, pool=60, general=10, processes=_processes(140 * MIB))
    seen = witness(before, after)
    assert seen.allocator_bytes == 60 * MIB
    assert seen.device_delta_bytes == 100 * MIB
    assert seen.nvml_delta_bytes == 90 * MIB
    assert seen.nvml_note is None


def test_witness_without_a_process_view_has_a_reason_and_no_substitute():
    before = _reading(1000, processes=unknown_view("not in the list"))
    seen = witness(before, _reading(900, processes=unknown_view("not in the list")))
    assert seen.nvml_delta_bytes is None
    assert "not in the list" in seen.nvml_note
    assert witness(_reading(9), _reading(8)).nvml_note == "NVML was not read"


def test_neighbour_moved_sees_memory_and_processes_that_came_or_went():
    one = _reading(9, processes=_processes(5, 100))
    assert neighbour_moved(one, _reading(9, processes=_processes(6, 100))) is None
    assert "100 to 60 bytes" in neighbour_moved(one, _reading(9, processes=_processes(5, 60)))
    assert "1 before, 0 after" in neighbour_moved(one, _reading(9, processes=_processes(5)))


def test_neighbour_moved_claims_nothing_of_what_it_cannot_see():
    hidden = _reading(9, processes=unknown_view("container"))
    assert neighbour_moved(hidden, _reading(9, processes=_processes(5, 1))) is None
    assert neighbour_moved(_reading(9), _reading(8)) is None


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [
        (None, None, "unknown"),
        (process_view([], pid=1), process_view([], pid=1), "unknown"),
        (process_view([(501, 9)], pid=1), process_view([(502, 7)], pid=1), "unknown"),
        (process_view([(1, None)], pid=1), process_view([(1, None)], pid=1), "unknown"),
        (_processes(5), _processes(6), "none"),
        (_processes(5, 9), _processes(6, 9), "still"),
        (_processes(5, 9), _processes(6, 8), "moved"),
        (_processes(5), _processes(6, 8), "moved"),
        (_processes(5, None), _processes(6, None), "unknown"),
    ],
)
def test_neighbours_that_cannot_be_seen_are_unknown_and_never_none(before, after, word):
    seen = witness(_reading(9, processes=before), _reading(8, processes=after))
    assert seen.neighbours == word
    if word == "unknown" and before is not None and before.own_bytes is None:
        assert seen.nvml_delta_bytes is None
        assert seen.nvml_note.startswith("per-process view not available here")
