from cgprof.accuracy.faults import FAULTS, GREEDY, PADDING, REFERENCE, REPLAY, WEIGHTS
from cgprof.accuracy.result import Scored
from cgprof.accuracy.sensitivity import Colours, judge_fault, leg_colours
from cgprof.record.scores import ItemScore
from tests.support.checks import greedy, score, weights
from tests.support.runs import key, leg, tape_graph

FAULT = FAULTS["shifted-positions"]


def items(right, wrong):
    return tuple(
        ItemScore(
            task="arithmetic",
            kind="generate",
            phase="replay",
            item_id=str(index),
            prompt="1+1=",
            gold="2",
            output="2" if index < right else "3",
            token_ids=(index < right,),
            score=float(index < right),
            correct=index < right,
        )
        for index in range(right + wrong)
    )


def scored(right, wrong):
    changes = {"correct": right, "value": right / (right + wrong), "n": right + wrong}
    return Scored(result=score("replay", **changes), items=items(right, wrong))


def test_a_leg_is_red_for_one_failed_key_and_green_only_if_none_failed():
    graphs = [
        tape_graph(key(8), parity=(leg(REPLAY), leg(REFERENCE), leg(PADDING, passed=None))),
        tape_graph(key(4), parity=(leg(REPLAY), leg(REFERENCE, passed=False))),
    ]
    found = leg_colours(graphs, greedy(passed=None), weights(passed=False))
    assert found.red == {REFERENCE, WEIGHTS}
    assert found.green == {REPLAY}


def test_as_stated_needs_all_red_legs_and_all_green_ones():
    green = frozenset({REPLAY, PADDING, GREEDY, WEIGHTS})
    red = frozenset({REFERENCE})
    assert judge_fault(FAULT, Colours(red=red, green=green), None, ()).as_stated
    assert not judge_fault(FAULT, Colours(red=frozenset(), green=green | red), None, ()).as_stated
    both = Colours(red=red | {REPLAY}, green=green - {REPLAY})
    assert not judge_fault(FAULT, both, None, ()).as_stated
    unseen = Colours(red=red, green=green - {REPLAY})
    assert not judge_fault(FAULT, unseen, None, ()).as_stated


def test_task_is_compared_by_item_with_the_clean_one():
    found = Colours(red=frozenset(), green=frozenset())
    eager = Scored(result=score("eager"), items=())
    judged = judge_fault(FAULT, found, scored(190, 10), (eager, scored(100, 100)))
    assert (judged.task.a, judged.task.b) == ("clean", "faulty")
    assert judged.task.verdict == "different"
    assert (judged.task.only_a, judged.task.only_b) == (90, 0)
    same = judge_fault(FAULT, found, scored(190, 10), (eager, scored(190, 10)))
    assert same.task.verdict == "same"
    assert judge_fault(FAULT, found, None, (eager,)).task is None
