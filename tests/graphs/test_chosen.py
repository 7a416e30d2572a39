import pytest

from cgprof.graphs.chosen import choose_keys
from cgprof.shapes import GraphKey, RuntimeMode


def key(size, microbatches=1):
    return GraphKey(
        mode=RuntimeMode.FULL,
        num_tokens=size,
        num_reqs=size,
        uniform_query_len=1,
        num_microbatches=microbatches,
    )


PLAIN = [key(size) for size in (256, 192, 128, 64, 32, 8, 1)]
TWINS = [key(size, 2) for size in (256, 128, 64, 32)]


def test_ends_of_both_kinds_come_first():
    assert choose_keys([*PLAIN, *TWINS], 4) == (key(256), key(1), key(256, 2), key(32, 2))


def test_further_keys_lie_in_the_widest_gaps():
    chosen = choose_keys([*PLAIN, *TWINS], 7)
    assert chosen[4:] == (key(128), key(128, 2), key(192))


@pytest.mark.parametrize("count", range(5))
def test_fewer_keys_are_the_first_of_more(count):
    assert choose_keys([*PLAIN, *TWINS], count) == choose_keys([*PLAIN, *TWINS], 9)[:count]


def test_every_key_is_chosen_once_when_all_are_asked_for():
    chosen = choose_keys([*PLAIN, *TWINS], 100)
    assert len(chosen) == len(set(chosen)) == len(PLAIN) + len(TWINS)


def test_without_twins_the_plain_keys_take_their_places():
    assert choose_keys(PLAIN, 4) == (key(256), key(1), key(128), key(192))


def test_one_key_is_chosen_once():
    assert choose_keys([key(8)], 4) == (key(8),)


def test_no_keys_give_none():
    assert choose_keys([], 4) == ()
