from cgprof.fresh.eager_work import (
    DeclaredException,
    compare_work,
    difference,
    graph_work,
)
from cgprof.fresh.start import FreshAnswer
from cgprof.record.contents import GraphContents

LAYER = {"norm": 4, "attention": 2, "gemm": 6}


def contents(kernels, **kinds):
    return GraphContents(
        kinds={"kernel": sum(kernels.values()), **kinds},
        edges=0,
        roots=1,
        forks=0,
        joins=0,
        width=1,
        longest_path=1,
        kernels=kernels,
    )


def test_equal_work_is_equal():
    found = difference(LAYER, dict(reversed(LAYER.items())))
    assert found.equal is True
    assert not found.missing
    assert not found.surplus


def test_lost_and_added_kernels_are_counted_by_name():
    found = difference({**LAYER, "gemm": 3, "reduce": 2}, LAYER)
    assert found.equal is False
    assert found.missing == {"gemm": 3}
    assert found.surplus == {"reduce": 2}


def test_excepted_names_do_not_count_and_carry_their_reason():
    rules = (DeclaredException("reduce_.*", "a reason"), DeclaredException("norm", "another"))
    found = difference({**LAYER, "reduce_1": 2}, LAYER, rules)
    assert found.equal is True
    assert found.excepted == {"reduce_1": "a reason"}
    assert not found.surplus


def test_exception_holds_for_the_whole_name_only():
    found = difference({**LAYER, "my_reduce": 1}, LAYER, (DeclaredException("reduce", "why"),))
    assert found.surplus == {"my_reduce": 1}
    assert found.equal is False


def test_nothing_is_excepted_unless_declared():
    assert difference({"a": 1}, {}).surplus == {"a": 1}
    assert difference({}, {"memset": 1}).missing == {"memset": 1}


def test_work_of_a_graph_counts_copies_of_all_kinds_and_no_node_that_only_orders():
    graph = contents(
        LAYER, memcpy=3, memset=1, empty=2, **{"peer-copy": 2, "event-record": 5, "event-wait": 4}
    )
    assert graph_work(graph) == {**LAYER, "memcpy": 5, "memset": 1}


def test_keys_are_compared_and_those_without_an_eager_step_say_why():
    graphs = {"a": contents(LAYER), "b": contents({"gemm": 1}), "c": contents(LAYER)}
    answer = FreshAnswer(work={"a": LAYER, "b": LAYER}, problems={"c": "refused"}, process_id=7)
    found = compare_work(graphs, answer)
    assert [one.equal for one in found.values()] == [True, False, None]
    assert found["c"].note == "refused"
    assert {one.process_id for one in found.values()} == {7}


def test_failed_process_is_the_note_of_every_key():
    found = compare_work({"a": contents(LAYER)}, FreshAnswer(failure="was killed"))
    assert found["a"].equal is None
    assert found["a"].note == "was killed"
