import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgprof.cost.launch_model import fit
from cgprof.cost.launch_prediction import dominant, predict, with_predictions
from cgprof.record.contents import GraphContents
from cgprof.record.cost import ReplayCost
from tests.support.planted_launches import RECORDS, planted_points, truth_ns
from tests.support.runs import cuda_graph, key, stages, stats

MODEL = fit(planted_points(), seed=0)
NOISY = fit(planted_points(noise=0.1, seed=5), seed=0)
KINDS = ("kernel", "memset", "memcpy", "peer-copy", "event-record", "event-wait", "fork")
counts_of_nodes = st.fixed_dictionaries({kind: st.integers(0, 2000) for kind in KINDS})


def contents(**changes):
    shape = {"edges": 9, "roots": 1, "forks": 0, "joins": 0, "width": 1, "longest_path": 10}
    return GraphContents(**(shape | changes))


def cost(idle_ns=30_000):
    return ReplayCost(idle=stats(idle_ns), idle_cpu=stats(idle_ns))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    nodes=counts_of_nodes,
    waited_ns=st.integers(0, 40_000_000),
    kind=st.sampled_from(KINDS),
    more=st.integers(0, 500),
)
def test_prediction_never_falls_with_a_count_or_a_wait_and_lies_in_its_interval(
    nodes, waited_ns, kind, more
):
    first = predict(NOISY, nodes, None, waited_ns)
    assert 0 <= first.ns.low <= first.ns.value <= first.ns.high
    assert min(first.terms.values()) >= 0
    assert first.ns.value == pytest.approx(sum(first.terms.values()))
    larger = predict(NOISY, {**nodes, kind: nodes[kind] + more}, None, waited_ns)
    assert larger.ns.value >= first.ns.value - 1e-6
    assert predict(NOISY, nodes, None, waited_ns + more * 1000).ns.value >= first.ns.value - 1e-6


def test_event_records_follow_the_curve_and_go_on_with_its_last_slope():
    def of_records(count):
        return predict(MODEL, {"event-record": count}).terms["event-record"]

    assert of_records(150) == pytest.approx((RECORDS[100] + RECORDS[200]) / 2, rel=0.01)
    slope = (RECORDS[400] - RECORDS[200]) / 200
    assert of_records(500) == pytest.approx(RECORDS[400] + 100 * slope, rel=0.01)


def test_a_wait_is_interpolated_for_the_launch_and_for_each_node_and_ends_with_the_longest():
    for waited_ns in (0, 3_000_000, 12_000_000, 20_000_000):
        found = predict(MODEL, {"kernel": 600}, None, waited_ns)
        assert found.ns.value == pytest.approx(truth_ns({"kernel": 600}, waited_ns), rel=0.01)
    longest, longer = (predict(MODEL, {"kernel": 600}, None, ns) for ns in (20_000_000, 90_000_000))
    assert longest.ns == longer.ns


def test_contents_tell_forks_and_copies_to_a_peer_from_other_copies():
    nodes = {"kernel": 300, "memcpy": 50}
    plain = predict(MODEL, nodes)
    kinds = {"kernel": 300, "memcpy": 10, "peer-copy": 40}
    found = predict(MODEL, nodes, contents(kinds=kinds, forks=20, peer_copies=40))
    assert found.counts == {"kernel": 300, "memcpy": 10, "fork": 20, "peer-copy": 40}
    assert found.ns.value > plain.ns.value + 30_000
    assert predict(MODEL, {**nodes, "fork": 9}, contents(kinds=nodes)).ns == plain.ns


def test_kinds_without_a_term_are_named_and_not_guessed():
    graph = {"kernel": 10, "empty": 2, "host": 1}
    assert predict(MODEL, graph).unknown == {"empty": 2, "host": 1}
    done = with_predictions(MODEL, {"a": cost()}, [cuda_graph(key(8), label="a", nodes=graph)], {})
    assert done["a"].dominated_by.endswith("not in the model: 2 empty, 1 host")


def test_scatter_of_the_fit_widens_the_interval():
    wide = predict(NOISY.model_copy(update={"scatter": 0.5}), {"kernel": 100}).ns
    narrow = predict(NOISY.model_copy(update={"scatter": 0.0}), {"kernel": 100}).ns
    assert wide.low < narrow.low <= narrow.high < wide.high


@pytest.mark.parametrize(
    ("nodes", "waited_ns", "words"),
    [
        ({"event-record": 192, "fork": 192}, 0, "192 event-record nodes"),
        ({"event-record": 192, "fork": 192}, 0, "leave out --nccl-graph-mixing (NCCL_GRAPH_"),
        ({"kernel": 100, "peer-copy": 100}, 0, "100 copies to a peer"),
        ({"kernel": 100, "peer-copy": 100}, 0, "let a kernel write to the peer"),
        ({"kernel": 10}, 0, "the call itself"),
        ({"kernel": 600}, 16_000_000, "caches cold"),
        ({"kernel": 30_000}, 0, "30000 kernel nodes"),
    ],
)
def test_dominant_names_the_largest_term_and_what_removes_it(nodes, waited_ns, words):
    assert words in dominant(predict(MODEL, nodes, None, waited_ns))


def test_without_a_wait_only_points_without_one_widen_the_interval():
    model = NOISY.model_copy(update={"scatter": 0.5, "warm_scatter": 0.0})
    sure = NOISY.model_copy(update={"scatter": 0.0, "warm_scatter": None})
    nodes = {"kernel": 100}
    assert predict(model, nodes).ns == predict(sure, nodes).ns
    assert (
        predict(model, nodes, None, 5_000_000).ns.high
        > predict(sure, nodes, None, 5_000_000).ns.high
    )


def test_costs_get_predictions_of_a_host_that_worked_and_the_wait_apart():
    graphs = [
        cuda_graph(key(8), label="quick", nodes={"kernel": 600}, replay=stages(9_000, 0)),
        cuda_graph(key(16), label="slow", nodes={"kernel": 600}, replay=stages(9_000, 20_000_000)),
        cuda_graph(key(32), label="failed", failure="no memory"),
    ]
    costs = {label: cost() for label in ("quick", "slow", "failed", "gone")}
    costs["slow"] = costs["slow"].model_copy(update={"waited_ns": 20_000_000})
    done = with_predictions(
        MODEL, costs, graphs, {"slow": contents(kinds={"kernel": 600}, forks=3)}
    )
    assert list(done) == list(costs)
    assert done["quick"].predicted.value == pytest.approx(truth_ns({"kernel": 600}, 0), rel=0.01)
    assert done["quick"].predicted_wait is None
    slow, warm = (truth_ns({"kernel": 600, "fork": 3}, waited_ns) for waited_ns in (20_000_000, 0))
    assert done["slow"].predicted.value == pytest.approx(warm, rel=0.01)
    assert done["slow"].predicted_wait.value == pytest.approx(slow - warm, rel=0.01)
    assert done["slow"].idle == costs["slow"].idle
    assert done["failed"] == costs["failed"]
    assert done["gone"] == costs["gone"]
