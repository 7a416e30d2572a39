from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgprof.cost.launch_model import WAITED_KNOTS_NS
from cgprof.cost.synthetic_layout import EVENT_SIZES, Spec, node_order, specs

BRANCHES = ("fork", "event-record")


def nodes_in(order):
    counts = Counter(order)
    forks = counts["fork"]
    counts["kernel"] += 2 * forks + counts["event-record"]
    counts["fork"] += counts["event-record"]
    return {kind: count for kind, count in counts.items() if count}


def test_every_spec_can_be_laid_out_with_just_its_nodes():
    for spec in specs(with_peer=True):
        wanted = {kind: count for kind, count in spec.counts.items() if count}
        assert nodes_in(node_order(spec.counts)) == wanted, spec


@settings(deadline=None, derandomize=True, max_examples=80)
@given(
    plain=st.integers(1, 60),
    forks=st.integers(0, 20),
    records=st.integers(0, 20),
    memsets=st.integers(0, 40),
)
def test_branches_stand_alone_between_other_nodes_and_kinds_are_mixed(
    plain, forks, records, memsets
):
    counts = {
        "kernel": plain + 2 * forks + records,
        "fork": forks + records,
        "event-record": records,
        "memset": memsets,
    }
    if plain + memsets <= forks + records:
        with pytest.raises(ValueError, match="no nodes to stand between"):
            node_order(counts)
        return
    order = node_order(counts)
    assert nodes_in(order) == {kind: count for kind, count in counts.items() if count}
    assert order[0] == "kernel"
    assert order[-1] not in BRANCHES
    beside = pairwise(order)
    assert not any(one in BRANCHES and other in BRANCHES for one, other in beside)


def test_kinds_of_one_graph_are_spread_over_it():
    order = node_order({"kernel": 300, "memset": 40})
    halves = Counter(order[:170])["memset"], Counter(order[170:])["memset"]
    assert abs(halves[0] - halves[1]) <= 1


def test_no_kernels_or_more_records_than_forks_are_refused():
    for counts in ({"memset": 5}, {"kernel": 9, "event-record": 2, "fork": 1}):
        with pytest.raises(ValueError, match="leaves no nodes"):
            node_order(counts)


def test_specs_hold_each_kind_and_each_wait_and_the_peer_only_if_there_is_one():
    with_peer, without = specs(with_peer=True), specs(with_peer=False)
    extra = [spec for spec in with_peer if spec not in without]
    assert {spec.kind for spec in extra} == {"peer-copy"}
    busy = {(spec.counts["kernel"], spec.busy_ns) for spec in without if spec.kind == "kernel"}
    for size in (10, 600, 1200):
        assert {(size, ns) for ns in (0, *WAITED_KNOTS_NS)} <= busy
    events = [spec.counts["event-record"] for spec in without if spec.kind == "event-record"]
    assert events == sorted(EVENT_SIZES)
    assert len(set(map(str, with_peer))) == len(with_peer)


def test_forks_of_a_graph_are_nodes_with_more_than_one_successor():
    found = [
        Spec(kind="fork", counts={"kernel": 60, "fork": number}).in_graph["fork"]
        for number in (0, 1, 2, 19)
    ]
    assert found == [0, 1, 3, 37]
