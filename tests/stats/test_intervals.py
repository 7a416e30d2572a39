from hypothesis import given
from hypothesis import strategies as st

from cgprof.stats.intervals import common, covered, united

SOME = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


def instants(intervals):
    return {instant for begin, end in intervals for instant in range(begin, end)}


def test_united_joins_what_overlaps_or_touches_and_drops_what_is_empty():
    assert united([(5, 9), (0, 2), (2, 4), (6, 7), (20, 20), (8, 12)]) == [(0, 4), (5, 12)]
    assert united([]) == []


def test_common_is_found_in_every_piece_of_either_group():
    assert common([(0, 10), (20, 30)], [(5, 22), (24, 26), (29, 40)]) == [
        (5, 10),
        (20, 22),
        (24, 26),
        (29, 30),
    ]
    assert common([(0, 10)], [(10, 20)]) == []


@given(SOME, SOME)
def test_covered_and_common_count_instants(first, second):
    assert covered(first) == len(instants(first))
    shared = common(first, second)
    assert instants(shared) == instants(first) & instants(second)
    assert shared == united(shared)
