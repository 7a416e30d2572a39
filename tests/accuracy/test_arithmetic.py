import pytest

from cgprof.accuracy.arithmetic import MOST_DIGITS, Problem, problems, split_of
from cgprof.errors import ConfigError

SPLITS = ("train", "held-out")


def parts(question):
    operator = "+" if "+" in question else "-"
    left, right = question.removesuffix("=").split(operator)
    return left, operator, right


@pytest.mark.parametrize("split", SPLITS)
def test_answers_are_right_and_least_significant_first(split):
    for problem in problems(2000, seed=3, split=split):
        left, operator, right = parts(problem.question)
        value = int(left) + int(right) if operator == "+" else int(left) - int(right)
        assert problem.answer[::-1] == str(value)


def test_parts_share_no_problem_in_either_order_of_operands():
    unordered = [
        {(operator, *sorted((left, right))) for left, operator, right in drawn}
        for drawn in (
            [parts(problem.question) for problem in problems(5000, seed=seed, split=split)]
            for seed, split in enumerate(SPLITS)
        )
    ]
    assert not unordered[0] & unordered[1]
    assert split_of(17, "+", 4) == split_of(4, "+", 17)


@pytest.mark.parametrize("split", SPLITS)
def test_problems_repeat_with_the_seed_and_differ_with_another(split):
    first = problems(50, seed=1, split=split)
    assert problems(50, seed=1, split=split) == first
    assert problems(80, seed=1, split=split)[:50] == first
    assert problems(50, seed=2, split=split) != first


def test_problems_are_distinct_and_of_every_length():
    drawn = problems(1500, seed=0, split="held-out")
    assert len({problem.question for problem in drawn}) == 1500
    shapes = {
        (len(left), operator, len(right))
        for left, operator, right in (parts(problem.question) for problem in drawn)
    }
    digits = range(1, MOST_DIGITS + 1)
    sums = {(left, "+", right) for left in digits for right in digits}
    differences = {(left, "-", right) for left in digits for right in digits if left >= right}
    assert shapes == sums | differences
    assert max(len(problem.answer) for problem in drawn) == MOST_DIGITS + 1


def test_the_problems_of_a_seed_stay_what_they_are():
    assert problems(2, seed=0, split="held-out") == [
        Problem("0+48=", "84"),
        Problem("939-368=", "175"),
    ]


@pytest.mark.parametrize("count", [-1, 10**7])
def test_impossible_counts_are_refused(count):
    with pytest.raises(ConfigError, match="ask for 0 to"):
        problems(count, seed=0, split="train")
