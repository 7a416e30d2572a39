from cgprof.cost.traced import TracedLaunches, by_label, traced_launches, with_traced
from cgprof.record.cost import ReplayCost
from tests.support.builders import captured_engine, tiny_run
from tests.support.records import graph_record, launch_stats


def cost():
    return ReplayCost(idle=launch_stats(9_000), idle_cpu=launch_stats(8_000))


def test_launches_go_to_the_labels_in_order_and_the_first_of_each_does_not_count():
    intervals = [(10, 999), (1_000, 1_010), (1_020, 1_040), (2_000, 9_999), (20_000, 20_300)]
    wall = [1_000, 12, 24, 8_000, 310, 530]
    found = by_label(["a", "b"], [*intervals, (30_000, 30_500)], wall, 2)
    inside = [found[label].interval for label in "ab"]
    assert [one.median_ns for one in inside] == [15, 400]
    assert [inside[0].count, inside[1].min_ns] == [2, 300]
    assert [found[label].wall.median_ns for label in "ab"] == [18, 420]


def test_launches_that_are_missing_or_too_many_are_a_reason():
    intervals = [(10, 20)] * 5
    assert by_label(["a", "b"], intervals, [9] * 5, 2) == "CUPTI recorded 5 of 6 launches"
    assert by_label(["a"], intervals, [9] * 5, 2) == "CUPTI recorded 5 of 3 launches"


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
