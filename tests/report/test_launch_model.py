from cgprof.cost.launch_model import fit
from cgprof.record.cost import ReplayCost
from cgprof.record.types import RankRecord
from cgprof.record.worth import Estimate
from cgprof.report.launch_model import is_within, launch_fit_table, launch_model_table
from tests.support.planted_launches import planted_points
from tests.support.runs import stats

MODEL = fit(planted_points(), seed=0).model_copy(update={"notes": ("left out: 400 x event",)})


def cost(idle_ns, predicted_ns=None, words=""):
    predicted = (
        None
        if predicted_ns is None
        else Estimate(value=predicted_ns, low=0.8 * predicted_ns, high=1.25 * predicted_ns)
    )
    return ReplayCost(
        idle=stats(idle_ns),
        idle_cpu=stats(idle_ns),
        beside=stats(idle_ns),
        predicted=predicted,
        dominated_by=words,
    )


def rank(model=None, **costs):
    return RankRecord(launch_model=model, replay_costs=costs)


def rows_by(table, *names):
    places = [list(table.columns).index(name) for name in names]
    return [tuple(row[place] for place in places) for row in table.rows]


def test_model_table_has_each_term_with_its_interval_and_its_graphs():
    table = launch_model_table(rank(MODEL))
    assert table.name == "launch-model"
    terms = rows_by(table, "term", "of")
    assert terms[0] == ("base", "a launch")
    assert {("kernel", "a node"), ("peer-copy", "a node"), ("fork", "a node")} <= set(terms)
    assert ("event-record", "200 together") in terms
    assert ("event-record", "a node beyond 400") in terms
    assert {("waited 5 ms", "a launch"), ("waited 5 ms", "a node")} <= set(terms)
    for low, value, high in rows_by(table, "low_ns", "cost_ns", "high_ns"):
        assert low <= value <= high
    points = dict(rows_by(table, "term", "points"))
    assert points["base"] == len(MODEL.points)
    assert points["memset"] == 3


def test_model_table_calls_its_numbers_estimates_and_keeps_what_was_left_out():
    text = launch_model_table(rank(MODEL)).to_text()
    assert f"estimates, fitted to {len(MODEL.points)} synthetic graphs of this run" in text
    assert "bootstrap over the points' residuals, each median's sampling error" in text
    assert "left out: 400 x event" in text


def test_fit_table_sets_the_prediction_beside_the_measured_replay():
    costs = {
        "near": cost(20_000, 22_000, "600 kernel nodes: 9 us of 22 us (41%)"),
        "edge": cost(20_000, 25_900, "x"),
        "far": cost(20_000, 60_000, "y"),
        "unknown": cost(20_000),
    }
    table = launch_fit_table(rank(MODEL, **costs))
    assert table.name == "launch-fit"
    found = rows_by(table, "key", "measured_ns", "predicted_ns", "within")
    assert found == [
        ("near", 20_000, 22_000, "yes"),
        ("edge", 20_000, 25_900, "yes"),
        ("far", 20_000, 60_000, "no"),
    ]
    assert rows_by(table, "dominated_by")[0] == ("600 kernel nodes",)
    text = table.to_text()
    assert "within 30% of what was measured: 2 of 3 keys" in text
    assert "outside: far;" in text
    assert "near," not in text.partition("outside:")[2]
    assert "x1.10" in text


def test_within_is_unknown_without_a_prediction_or_a_time():
    assert is_within(cost(20_000)) is None
    assert is_within(cost(0, 5_000)) is None
    assert is_within(cost(20_000, 13_000)) is False


def test_tables_without_a_model_have_no_rows():
    for table in (launch_model_table(rank()), launch_fit_table(rank(a=cost(20_000)))):
        assert table.rows == ()
        assert table.notes == ()


def test_launches_that_neighbours_made_longer_are_judged_by_their_lower_quartile():
    quiet = cost(40_000, 21_000)
    beside = quiet.beside.model_copy(update={"p25_ns": 20_000})
    model = MODEL.model_copy(update={"worked_ns": 300_000})
    table = launch_fit_table(rank(model, a=quiet.model_copy(update={"beside": beside})))
    found = rows_by(table, "measured_ns", "measured_median_ns", "within")
    assert found == [(20_000, 40_000, "yes")]
    old = launch_fit_table(rank(model, a=cost(20_000, 22_000))).to_text()
    assert "measured: median" in old
    assert "measured: lower quartile" in table.to_text()
