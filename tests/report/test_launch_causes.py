import pytest

from cgprof.record.cost import LaunchModel, ReplayCost
from cgprof.record.types import RankRecord
from cgprof.record.worth import Estimate
from cgprof.report.checks_of_launch import launch_model_loose, launch_unexplained
from cgprof.report.launch_causes import cause_of_miss, cold_caches
from cgprof.report.launch_model import launch_fit_table
from tests.support.records import launch_stats
from tests.support.runs import cuda_graph, key, run_record, stages

WORKED_NS = 300_000


def estimate(value, low=None, high=None):
    low = 0.9 * value if low is None else low
    return Estimate(value=value, low=low, high=2 * value - low if high is None else high)


def model(**changes):
    facts = {"scatter": 0.6, "warm_scatter": 0.1, "worked_ns": WORKED_NS} | changes
    return LaunchModel(base_ns=estimate(5_000), terms=(), points=(), **facts)


def cost(measured_ns, predicted, adds=None):
    stats = launch_stats(measured_ns)
    return ReplayCost(
        idle=stats,
        idle_cpu=stats,
        beside=stats,
        predicted=predicted,
        after_wait=None if adds is None else launch_stats(measured_ns + round(adds.value)),
        waited_ns=None if adds is None else 16_000_000,
        wait_adds=adds,
        predicted_wait=None if adds is None else estimate(12_000),
    )


def rank_of(found, turns_ns=20_000, hot_ns=20_000, launch_model=None):
    graph = cuda_graph(key(8), label="a", replay=stages(hot_ns), round_robin=stages(turns_ns))
    return RankRecord(
        graphs=(graph,), replay_costs={"a": found}, launch_model=launch_model or model()
    )


MISSED = estimate(10_000)  # of 24 us: 14 us more than predicted
WIDE = estimate(10_000, 0.0, 60_000.0)


@pytest.mark.parametrize(
    ("adds", "turns_ns", "name"),
    [
        (estimate(50_000), 20_000, "the wait"),
        (estimate(50_000), 60_000, "the wait"),
        (estimate(9_000), 60_000, "cold caches"),
        (estimate(50_000, -1.0), 20_000, "unexplained"),  # may be nothing
        (estimate(50_000, -1.0), 60_000, "cold caches"),
        (estimate(6_900), 20_000, "unexplained"),  # less than half of it
        (estimate(7_100), 20_000, "the wait"),
        (estimate(-8_000, -9_000, -7_000), 15_000, "unexplained"),  # makes launches cheaper
        (None, 20_000, "unexplained"),
    ],
)
def test_cause_is_the_largest_effect_that_is_sure_and_large_enough(adds, turns_ns, name):
    found = cause_of_miss(rank_of(cost(24_000, MISSED, adds), turns_ns), "a")
    assert found.name == name
    assert found.words.startswith(f"{name}: 14 us more than predicted")


def test_words_have_the_numbers_of_the_cause():
    waited = cause_of_miss(rank_of(cost(24_000, MISSED, estimate(50_000))), "a").words
    assert "after 16 ms of waiting a launch takes 50 us (45 us to 55 us) more" in waited
    assert "300 us of work may leave a part" in waited
    cold = cause_of_miss(rank_of(cost(24_000, MISSED), 60_000), "a").words
    assert "all keys in turn a launch takes 40 us (" in cold
    neither = cause_of_miss(rank_of(cost(24_000, MISSED)), "a").words
    assert "the wait not measured, cold caches 0 ns (" in neither


def test_launch_that_is_cheaper_than_predicted_is_unexplained_whatever_was_measured():
    found = cause_of_miss(rank_of(cost(10_000, estimate(24_000), estimate(50_000)), 60_000), "a")
    assert found.name == "unexplained"
    assert "14 us less than predicted" in found.words


def test_near_predictions_and_runs_whose_hosts_did_not_do_the_same_have_no_cause():
    assert cause_of_miss(rank_of(cost(12_000, MISSED, estimate(50_000))), "a") is None
    older = rank_of(cost(24_000, MISSED), launch_model=model(worked_ns=None))
    assert cause_of_miss(older, "a") is None
    assert cause_of_miss(older, "gone") is None


def test_cold_caches_are_turns_less_hot_with_the_medians_errors():
    graph = cuda_graph(key(8), replay=stages(20_000), round_robin=stages(50_000))
    found = cold_caches(graph)
    assert found.value == 30_000
    assert found.low < found.value < found.high
    assert found.high - found.value == found.value - found.low < 1_000
    assert cold_caches(graph.model_copy(update={"round_robin": None})) is None
    assert cold_caches(None) is None


def test_fit_table_has_the_wait_beside_the_prediction_and_the_cause_in_words():
    table = launch_fit_table(rank_of(cost(24_000, MISSED, estimate(50_000)), hot_ns=55_000))
    (row,) = table.records()
    expected = {
        "measured_ns": 24_000,
        "within": "no",
        "cause": "the wait",
        "waited_ns": 16_000_000,
        "wait_adds_ns": 50_000,
        "predicted_wait_ns": 12_000,
        "with_wait_ns": 60_000,
        "loop_ns": 55_000,
        "with_wait_over_loop_ratio": pytest.approx(60 / 55),
        "predicted_over_loop_ratio": pytest.approx(10 / 55),
    }
    assert {name: row[name] for name in expected} == expected
    text = table.to_text()
    assert "the host works for 300 us" in text
    assert "outside: a, the wait: 14 us more than predicted" in text
    assert "within 30% of it: predicted 0 of 1 keys, predicted + wait 1" in text


def test_fit_table_of_an_older_run_has_neither():
    older = rank_of(cost(24_000, MISSED), launch_model=model(worked_ns=None))
    text = launch_fit_table(older).to_text()
    assert "outside: a; where the interval" in text
    assert "and the wait for the replay before" in text
    for words in ("wait adds", "missing", "in steps"):
        assert words not in text


def test_fit_table_says_why_ranks_have_no_rows():
    stats = launch_stats(9_000)
    alone = ReplayCost(idle=stats, idle_cpu=stats, predicted=MISSED)
    table = launch_fit_table(rank_of(alone))
    assert table.rows == ()
    assert "they must replay equally often" in table.to_text()


def loose(found, **changes):
    run = run_record("cuda", (), ranks=(rank_of(found, launch_model=model(**changes)),))
    return list(launch_model_loose(run)), list(launch_unexplained(run))


def test_loose_is_a_warm_miss_that_the_interval_holds_and_unexplained_one_that_it_does_not():
    (held,), none = loose(cost(24_000, WIDE, estimate(50_000)))
    assert none == []
    assert held.keys == ("a",)
    assert held.evidence["cause"].startswith("the wait: 14 us more")
    assert (held.evidence["measured_ns"], held.evidence["keys_near_the_model"]) == (24_000, 0)
    none, (outside,) = loose(cost(24_000, MISSED, estimate(50_000)))
    assert none == []
    assert outside.evidence["cause"] == held.evidence["cause"]
    assert loose(cost(12_000, WIDE)) == ([], [])


def test_scatter_of_launches_after_a_wait_does_not_make_a_model_loose():
    near = cost(12_000, MISSED)
    assert loose(near, scatter=0.9, warm_scatter=0.2) == ([], [])
    (found,), _ = loose(near, scatter=0.9, warm_scatter=0.4)
    assert found.evidence["scatter_of_points"] == 0.4
    (found,), _ = loose(near, scatter=0.9, warm_scatter=None)
    assert found.evidence["scatter_of_points"] == 0.9
