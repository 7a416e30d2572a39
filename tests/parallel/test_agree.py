import pytest

from cgprof.config.schema import RunConfig
from cgprof.errors import RankError
from cgprof.parallel.agree import agree_equal, agree_success
from tests.support.graphs import DBO, decode_key, plan
from tests.support.ranks import run_ranks


def compare(ranks, what, values):
    try:
        agree_equal(ranks, what, values[ranks.rank])
    except RankError as error:
        return str(error)
    return None


@pytest.mark.ranks(2)
def test_agree_equal_names_the_field_of_a_config_that_differs():
    config = RunConfig()
    other = config.model_copy(
        update={"limits": config.limits.model_copy(update={"max_num_seqs": 7})}
    )
    assert run_ranks(2, compare, "config", [config, config]) == [None, None]
    message = "rank 1: config.limits.max_num_seqs differs: rank 1 has 7; rank 0 has 256"
    assert run_ranks(2, compare, "config", [config, other]) == [message] * 2


@pytest.mark.ranks(4)
def test_agree_equal_takes_the_side_of_most_ranks():
    plans = [plan(sizes=(8, 16), microbatch=DBO)] * 4
    plans[0] = plan(sizes=(8, 24), microbatch=DBO)
    message = "rank 0: plan.keys[0].num_reqs differs: rank 0 has 24; ranks 1, 2, 3 have 16"
    assert run_ranks(4, compare, "plan", plans) == [message] * 4


@pytest.mark.ranks(2)
def test_agree_equal_shows_values_of_unlike_length_shortly():
    keys = [str(decode_key(size)) for size in range(1, 200)]
    found = run_ranks(2, compare, "keys", [keys, keys[:-1]])
    assert found[0] == found[1]
    assert found[0].startswith('rank 1: keys differs: rank 1 has ["FULL-1x1q1", ')
    assert len(found[0]) < 400


def attempt(ranks, problems, names):
    try:
        return agree_success(ranks, problems[ranks.rank], what=names[ranks.rank])
    except RankError as error:
        return str(error)


@pytest.mark.ranks(2)
def test_agree_success_tells_all_ranks_who_failed_and_at_what():
    key = str(decode_key(8))
    assert run_ranks(2, attempt, [None, None], [key, key]) == [{}, {}]
    assert run_ranks(2, attempt, [None, "no memory"], [key, key]) == [{1: "no memory"}] * 2


@pytest.mark.ranks(2)
def test_agree_success_refuses_ranks_that_attempt_unlike_keys():
    names = [str(decode_key(8)), str(decode_key(16))]
    message = (
        "rank 1: ranks attempt different things: rank 1 has FULL-16x16q1; rank 0 has FULL-8x8q1"
    )
    assert run_ranks(2, attempt, [None, None], names) == [message] * 2
