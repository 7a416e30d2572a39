import pytest

from cgprof.config.schema import MicrobatchConfig
from cgprof.graphs.dispatch import decide, vote
from cgprof.graphs.explain import load_shape
from cgprof.graphs.vetoes import vetoes
from cgprof.shapes import BatchShape, VetoReason

CONFIG = MicrobatchConfig(enabled=True, decode_token_threshold=8, prefill_token_threshold=64)
IDLE, BELOW, MIXED = VetoReason.IDLE, VetoReason.BELOW_THRESHOLD, VetoReason.NOT_UNIFORM
NOTHING = BatchShape(num_reqs=0, num_tokens=0, max_query_len=0)


def decode(tokens, query_len=1):
    return load_shape(tokens, query_len=query_len)


def mixed(decode_tokens, prefill_tokens):
    return load_shape(decode_tokens, prefill_tokens=prefill_tokens)


def found(*shapes, config=CONFIG):
    votes = [vote(shape, (), config) for shape in shapes]
    return [(veto.rank, veto.reason) for veto in vetoes(votes, config)]


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ((decode(8), decode(9)), []),
        ((decode(8), decode(7)), [(1, BELOW)]),
        ((NOTHING, decode(8), decode(3)), [(0, IDLE), (2, BELOW)]),
        ((decode(20), mixed(4, 16)), [(1, MIXED)]),  # 20 tokens would do as a decode step
        ((decode(20), mixed(1, 2)), [(1, BELOW)]),
        ((decode(8), mixed(4, 70)), [(1, MIXED)]),  # all wish it, together they are not uniform
        ((decode(70), mixed(4, 70)), []),
        ((decode(8), decode(64, query_len=2)), [(0, MIXED)]),
        ((mixed(0, 64), mixed(0, 64)), []),
    ],
)
def test_vetoes_name_the_ranks_and_their_reasons(shapes, expected):
    assert found(*shapes) == expected


def test_nobody_vetoes_what_nobody_wishes():
    assert found(decode(7), decode(3), NOTHING) == []
    assert found(NOTHING, NOTHING) == []
    off = MicrobatchConfig(enabled=False)
    assert found(decode(512), decode(1), config=off) == []


def test_there_is_a_veto_exactly_where_a_wished_split_is_refused_by_votes():
    sizes = [NOTHING, decode(1), decode(8), decode(9), mixed(4, 16), mixed(2, 70), mixed(0, 64)]
    for one in sizes:
        for other in sizes:
            votes = [vote(one, (), CONFIG), vote(other, (), CONFIG)]
            wished = any(cast.wants_microbatch for cast in votes)
            split = decide(votes, (), CONFIG)
            refused = split.key.num_microbatches == 1 and split.reason != "empty-microbatch"
            assert bool(vetoes(votes, CONFIG)) == (wished and refused), (one, other)
