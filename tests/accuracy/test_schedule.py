import pytest

from cgprof.accuracy.schedule import make_schedule
from cgprof.config.schema import Limits
from cgprof.errors import ConfigError

LIMITS = Limits(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=160)


def schedule(steps=64, limits=LIMITS, num_blocks=1000, seed=0):
    return make_schedule(limits, 128, steps=steps, num_blocks=num_blocks, seed=seed)


def test_identical_prompts_come_first_together_and_stay_for_all_steps():
    same = [a for a in schedule() if a.request.request_id.startswith("same")]
    assert len(same) == 8
    assert {arrival.step for arrival in same} == {0}
    assert len({arrival.request.prompt for arrival in same}) == 1
    assert {arrival.request.max_new_tokens for arrival in same} == {64}


def test_longest_request_ends_at_max_model_len():
    longest = max(len(a.request.prompt) + a.request.max_new_tokens for a in schedule())
    assert longest == LIMITS.max_model_len


def test_requests_arrive_over_time_and_end_at_many_lengths():
    made = schedule()
    steps = [arrival.step for arrival in made]
    assert steps == sorted(steps)
    assert len(set(steps)) > 6
    assert max(steps) < 64
    assert len({arrival.request.max_new_tokens for arrival in made}) > 6
    assert any(len(arrival.request.prompt) == 1 for arrival in made)


def test_same_seed_makes_the_same_schedule():
    assert schedule(seed=3) == schedule(seed=3)
    assert schedule(seed=3) != schedule(seed=4)


def test_few_blocks_shorten_the_longest_request():
    made = schedule(num_blocks=6)
    assert max(len(a.request.prompt) + a.request.max_new_tokens for a in made) == 96


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_few_rows_still_make_a_schedule(rows):
    made = schedule(limits=LIMITS.model_copy(update={"max_num_seqs": rows}))
    assert any(arrival.request.max_new_tokens == 64 for arrival in made)


@pytest.mark.parametrize(("steps", "word"), [(63, "at least 64"), (149, "--max-model-len")])
def test_too_few_or_too_many_steps_are_refused(steps, word):
    with pytest.raises(ConfigError, match=word):
        schedule(steps)
