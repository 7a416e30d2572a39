import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgprof.config.schema import MicrobatchConfig, TwinPolicy
from cgprof.graphs.dispatch import choose, decide, eager_key, widest
from cgprof.microbatch.rule import last_microbatch_is_empty
from cgprof.shapes import CapturePolicy, DecisionReason, GraphKey, RuntimeMode
from tests.support.graphs import DBO, NO_DBO, decode, decode_key, plan, prefill, votes

GRAPH, EMPTY = DecisionReason.GRAPH, DecisionReason.EMPTY_MICROBATCH
NO_FIT, RANK_EAGER = DecisionReason.NO_FIT, DecisionReason.RANK_EAGER


def decided(shapes, keys, config=DBO):
    decision = decide(votes(shapes, keys, config), keys, config)
    return decision.key, decision.reason


def both(num_reqs):
    return [decode_key(num_reqs), decode_key(num_reqs, num_microbatches=2)]


def test_choose_takes_the_nearest_size_and_a_larger_one_when_that_rejects():
    few_reqs = GraphKey(mode=RuntimeMode.FULL, num_tokens=8, num_reqs=2)
    more_reqs = GraphKey(mode=RuntimeMode.FULL, num_tokens=16, num_reqs=16)
    assert choose(prefill(7, 2), [more_reqs, few_reqs]) is few_reqs
    assert choose(prefill(7, 3), [more_reqs, few_reqs]) is more_reqs
    assert choose(prefill(17), [more_reqs, few_reqs]) is None


def test_choose_prefers_full_then_uniform_then_padded_requests_in_one_size():
    uniform = decode_key(8)
    general = GraphKey(mode=RuntimeMode.FULL, num_tokens=8, num_reqs=8)
    unpadded = GraphKey(mode=RuntimeMode.FULL, num_tokens=8)
    piecewise = GraphKey(mode=RuntimeMode.PIECEWISE, num_tokens=8)
    best_first = [uniform, general, unpadded, piecewise]
    for keys in itertools.permutations(best_first):
        assert choose(decode(5), keys) is uniform
    assert choose(prefill(5), best_first) is general
    assert choose(prefill(5), best_first[2:]) is unpadded


def test_choose_never_crosses_the_number_of_microbatches():
    plain, twin = both(64)
    assert choose(decode(64), [twin]) is None
    assert choose(decode(64), [plain, twin], num_microbatches=2) is twin
    assert choose(decode(64), [plain], num_microbatches=2) is None


def test_choose_finds_no_twin_for_a_batch_that_is_not_uniform():
    _, twin = both(64)
    assert choose(decode(64), [twin], num_microbatches=2) is twin
    assert choose(prefill(64), [twin], num_microbatches=2) is None
    assert choose(decode(32, 2), [twin], num_microbatches=2) is None


def test_choose_gives_a_prompt_chunk_of_decode_length_no_decode_graph():
    assert choose(prefill(1), [decode_key(8)]) is None
    assert choose(decode(1), [decode_key(8)]) is not None


@pytest.mark.parametrize(
    ("loads", "padded", "runs_split"),
    [
        ((64, 64), 64, True),
        ((33, 128), 128, False),
        ((63, 128), 128, False),
        ((64, 128), 128, False),
        ((65, 128), 128, True),
        ((128, 128), 128, True),
        ((33,), 128, False),
        ((65,), 128, True),
    ],
)
def test_decide_refuses_a_twin_whose_last_microbatch_is_padding(loads, padded, runs_split):
    shapes = [decode(n) for n in loads]
    plain, twin = both(padded)
    if runs_split:
        assert decided(shapes, [plain, twin]) == (twin, GRAPH)
        return
    assert decided(shapes, [plain, twin]) == (plain, EMPTY)
    assert decided(shapes, [twin]) == (eager_key(max(loads)), EMPTY)


def test_decide_refuses_the_twin_of_33_requests_with_sizes_32_and_128():
    keys = plan(sizes=(32, 128), microbatch=DBO).keys
    assert decided([decode(33)], keys) == (decode_key(128), EMPTY)
    only = DBO.model_copy(update={"twins": TwinPolicy.TWIN_ONLY})
    twin_keys = plan(sizes=(32, 128), microbatch=only).keys
    assert decided([decode(33)], twin_keys, only) == (eager_key(33), EMPTY)


def test_decide_splits_only_when_every_rank_wants_to():
    keys = plan(microbatch=DBO).keys
    assert decided([decode(64), decode(64)], keys)[0].num_microbatches == 2
    assert decided([decode(64), decode(16)], keys) == (decode_key(64), GRAPH)


def test_decide_splits_a_long_prefill_eagerly_and_unpadded():
    keys = plan(microbatch=DBO).keys
    assert decided([prefill(600, 2)], keys) == (eager_key(600, 2), NO_FIT)
    assert decided([prefill(511, 2)], keys) == (eager_key(511), NO_FIT)


def test_decide_splits_a_uniform_step_beyond_all_keys_eagerly():
    keys = plan(sizes=(32,), microbatch=DBO).keys
    assert decided([decode(64)], keys) == (eager_key(64, 2), NO_FIT)


def test_decide_keeps_the_plain_key_when_only_that_was_captured():
    assert decided([decode(64)], [decode_key(64)]) == (decode_key(64), GRAPH)


def test_decide_does_not_compare_two_ranks_of_unlike_lengths_as_uniform():
    keys = plan(microbatch=DBO).keys
    key, reason = decided([decode(64), prefill(64, 8)], keys)
    assert (key, reason) == (eager_key(64), RANK_EAGER)


def test_decide_runs_eager_when_one_rank_must():
    keys = plan(seqs=8, microbatch=NO_DBO).keys
    assert decided([decode(4), prefill(30)], keys, NO_DBO) == (eager_key(30), RANK_EAGER)
    assert decided([prefill(9), prefill(30)], keys, NO_DBO) == (eager_key(30), NO_FIT)


def test_decide_lets_an_idle_rank_follow_and_idles_when_all_do():
    keys = plan(microbatch=DBO).keys
    assert decided([decode(8), decode(0)], keys) == (decode_key(8), GRAPH)
    assert decided([decode(64), decode(0)], keys) == (decode_key(64), GRAPH)
    assert decided([decode(0), decode(0)], keys) == (eager_key(0), DecisionReason.IDLE)


def test_widest_is_uniform_only_when_all_busy_ranks_are_alike():
    assert widest(votes([decode(4), decode(2), decode(0)], [])).uniform_query_len == 1
    # 4 requests, 8 tokens and length 2 come from different ranks here.
    assert widest(votes([decode(4), decode(4, 2)], [])).uniform_query_len is None


SHAPES = st.one_of(
    st.builds(decode, st.integers(0, 40), st.sampled_from([1, 1, 1, 3])),
    st.builds(prefill, st.integers(3, 90), st.integers(1, 3)),
)


@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    num_microbatches=st.integers(2, 8),
    threshold=st.integers(1, 40),
    twins=st.sampled_from(TwinPolicy),
    policy=st.sampled_from([CapturePolicy.FULL, CapturePolicy.FULL_DECODE_ONLY]),
    sizes=st.none() | st.sets(st.integers(1, 120), min_size=1, max_size=5).map(tuple),
)
def test_decision_covers_every_rank_and_never_has_an_empty_microbatch(
    shapes, order, num_microbatches, threshold, twins, policy, sizes
):
    config = MicrobatchConfig(
        enabled=True,
        num_microbatches=num_microbatches,
        decode_token_threshold=threshold,
        prefill_token_threshold=2 * threshold,
        twins=twins,
    )
    keys = plan(policy, seqs=40, sizes=sizes, microbatch=config, query_lens=(1, 3)).keys
    cast = votes(shapes, keys, config)
    decision = decide(cast, keys, config)
    key = decision.key
    loads = [shape.num_tokens for shape in shapes]
    assert decision.tokens_per_rank == tuple(loads)
    assert all(key.covers(shape) for shape in shapes if shape.num_tokens)
    assert (key in keys) == (key.mode is not RuntimeMode.NONE)
    if key.num_microbatches > 1:
        assert not last_microbatch_is_empty(min(loads), key.num_tokens, key.num_microbatches)
    if key.mode is RuntimeMode.NONE:
        assert key.num_tokens == max(loads)
    # Neither the order of ranks nor that of keys may matter.
    shuffled_votes, shuffled_keys = list(cast), list(keys)
    order.shuffle(shuffled_votes)
    order.shuffle(shuffled_keys)
    again = decide(shuffled_votes, shuffled_keys, config)
    assert (again.key, again.reason) == (key, decision.reason)


@pytest.mark.parametrize("num_microbatches", range(2, 9))
def test_no_load_of_one_or_two_ranks_leaves_a_microbatch_of_a_twin_empty(num_microbatches):
    config = DBO.model_copy(
        update={"num_microbatches": num_microbatches, "decode_token_threshold": num_microbatches}
    )
    keys = plan(seqs=24, sizes=(8, 16, 20, 24), microbatch=config).keys
    taken = set()
    for first, second in itertools.product(range(1, 25), repeat=2):
        key, _ = decided([decode(first), decode(second)], keys, config)
        if key.num_microbatches > 1:
            width = key.num_tokens // num_microbatches
            assert min(first, second) > width * (num_microbatches - 1)
            taken.add(key)
    assert any(key.is_twin for key in taken)
