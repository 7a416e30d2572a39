import pytest

from cgprof.cost.traced import TracedLaunches, by_label, traced_launches, with_traced
from cgprof.record.cost import ReplayCost
from tests.support.builders import captured_engine, tiny_run
from tests.support.records import graph_record, launch_stats


def cost():
    return ReplayCost(idle=launch_stats(9_000), idle_cpu=launch_stats(8_000))


INTERVALS = [
    (10, 999),
    (1_000, 1_010),
    (1_020, 1_040),
    (2_000, 9_999),
    (20_000, 20_300),
    (30_010, 30_510),
]
WALL = [1_000, 12, 24, 8_000, 310, 530]


def calls_around(intervals, wall):
    return [(begin, begin + took) for (begin, _), took in zip(intervals, wall, strict=True)]


@pytest.mark.parametrize("pace", [1, 2, 3])
def test_launches_go_to_the_labels_in_order_by_our_clock_and_the_first_does_not_count(pace):
    by_cupti = [(begin * pace + 7, end * pace + 7) for begin, end in INTERVALS]
    found = by_label(["a", "b"], by_cupti, calls_around(INTERVALS, WALL), 2)
    inside = [found[label].interval for label in "ab"]
    assert [one.median_ns for one in inside] == [15, 400]
    assert [inside[0].count, inside[1].min_ns] == [2, 300]
    assert [found[label].wall.median_ns for label in "ab"] == [18, 420]


def test_launches_that_are_missing_or_too_many_are_a_reason():
    calls = calls_around(INTERVALS, WALL)[:5]
    assert by_label(["a", "b"], INTERVALS[:5], calls, 2) == "CUPTI recorded 5 of 6 launches"
    assert by_label(["a"], INTERVALS[:5], calls, 2) == "CUPTI recorded 5 of 3 launches"


def test_clock_that_stands_still_is_a_reason_and_no_key_no_launch():
    stood = [(5, 6)] * 6
    assert "stood still" in by_label(["a", "b"], stood, calls_around(INTERVALS, WALL), 2)
    assert by_label([], [], [], 2) == {}


def test_tape_launches_no_cuda_graph():
    with captured_engine(tiny_run(sizes=(2,))) as engine:
        (key,) = engine.graphs.keys
        before = engine.graphs.captured[key].replays
        assert "no CUDA graph" in traced_launches(engine, [graph_record()])
        assert engine.graphs.captured[key].replays == before


def test_costs_get_what_was_traced_or_the_reason():
    stats, wall = launch_stats(5_000), launch_stats(5_500)
    traced = TracedLaunches(interval=stats, wall=wall)
    found = with_traced({"a": cost(), "b": cost()}, {"a": traced})
    assert (found["a"].traced, found["b"].traced) == (stats, None)
    assert found["a"].traced_wall == wall
    refused = with_traced({"a": cost()}, "CUPTI is not installed")
    assert (refused["a"].traced, refused["a"].traced_note) == (None, "CUPTI is not installed")
    assert refused["a"].idle == cost().idle
