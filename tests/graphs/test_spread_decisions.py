"""Twins that would be refused, replayed with spread tokens: when, when not, and how it is told."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgprof.config.schema import Limits, MicrobatchConfig, TwinPolicy
from cgprof.graphs import search as searching
from cgprof.graphs.dispatch import decide, eager_key
from cgprof.graphs.explain import explain, load_shape, microbatch_loads
from cgprof.graphs.search import search
from cgprof.shapes import DecisionReason, GraphKey, RuntimeMode
from tests.support.graphs import DBO, decode, decode_key, plan, prefill, votes

GRAPH, EMPTY, SPREAD = DecisionReason.GRAPH, DecisionReason.EMPTY_MICROBATCH, DecisionReason.SPREAD
ON = DBO.model_copy(update={"spread_real_tokens": True})
PLAIN, TWIN = decode_key(128), decode_key(128, num_microbatches=2)


def decided(shapes, keys=(PLAIN, TWIN), config=ON):
    decision = decide(votes(shapes, keys, config), keys, config)
    return decision.key, decision.reason


@pytest.mark.parametrize(
    ("loads", "reason"),
    [
        ((63, 97), SPREAD),
        ((64, 128), SPREAD),
        ((32, 128), SPREAD),
        ((63,), SPREAD),
        ((33, 40), SPREAD),
        ((65, 97), GRAPH),
        ((128, 128), GRAPH),
    ],
)
def test_a_refused_twin_is_replayed_spread(loads, reason):
    shapes = [decode(load) for load in loads]
    assert decided(shapes) == (TWIN, reason)
    assert decided(shapes, config=DBO) == ((PLAIN, EMPTY) if reason is SPREAD else (TWIN, GRAPH))
    assert decided(shapes, [TWIN]) == (TWIN, reason)


def test_a_rank_below_the_threshold_or_idle_keeps_the_plain_key():
    assert decided([decode(31), decode(128)]) == (PLAIN, GRAPH)
    assert decided([decode(0), decode(128)]) == (PLAIN, GRAPH)
    assert decided([decode(0), decode(63)]) == (PLAIN, GRAPH)
    assert decided([decode(0), decode(0)]) == (eager_key(0), DecisionReason.IDLE)
    lowest = ON.model_copy(update={"decode_token_threshold": 0})
    assert decided([decode(0), decode(128)], config=lowest) == (PLAIN, GRAPH)
    assert decided([decode(1), decode(128)], config=lowest) == (PLAIN, GRAPH)
    assert decided([decode(2), decode(128)], config=lowest) == (TWIN, SPREAD)


def test_longer_queries_and_prompts_are_never_spread():
    keys = [decode_key(64, query_len=2), decode_key(64, query_len=2, num_microbatches=2)]
    assert decided([decode(32, 2), decode(60, 2)], keys) == (keys[0], EMPTY)
    general = [
        GraphKey(mode=RuntimeMode.FULL, num_tokens=128, num_reqs=128, num_microbatches=count)
        for count in (1, 2)
    ]
    low = ON.model_copy(update={"prefill_token_threshold": 32})
    assert decided([prefill(40), prefill(100)], general, low) == (general[0], EMPTY)
    assert decided([decode(40), decode(100)], general, low) == (general[0], EMPTY)
    # No twin: an eager split that would be empty.
    assert decided([prefill(40), prefill(100)], [], low) == (eager_key(100), EMPTY)


SHAPES = st.one_of(
    st.builds(decode, st.integers(0, 40), st.sampled_from([1, 1, 1, 1, 2])),
    st.builds(prefill, st.integers(3, 90), st.integers(1, 3)),
)


@settings(max_examples=300)
@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=4)
    | st.lists(st.builds(decode, st.integers(1, 40)), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    count=st.integers(2, 5),
    threshold=st.integers(1, 12),
    twins=st.sampled_from(TwinPolicy),
    sizes=st.none() | st.sets(st.integers(1, 40), min_size=1, max_size=5).map(tuple),
)
def test_only_empty_microbatches_of_decode_twins_are_decided_otherwise(
    shapes, order, count, threshold, twins, sizes
):
    off = MicrobatchConfig(
        enabled=True,
        num_microbatches=count,
        decode_token_threshold=threshold,
        prefill_token_threshold=threshold,
        twins=twins,
    )
    on = off.model_copy(update={"spread_real_tokens": True})
    keys = list(plan(seqs=40, sizes=sizes, microbatch=off, query_lens=(1, 2)).keys)
    before = decide(votes(shapes, keys, off), keys, off)
    cast = votes(shapes, keys, on)
    after = decide(cast, keys, on)
    loads = [shape.num_tokens for shape in shapes]
    fit = [
        key
        for key in keys
        if key.num_microbatches == count
        and key.uniform_query_len == 1
        and key.num_tokens >= max(loads)
    ]
    one_each = all(shape == decode(shape.num_tokens) for shape in shapes)
    if before.reason is EMPTY and one_each and fit:
        nearest = min(fit, key=lambda key: key.num_tokens)
        assert (after.key, after.reason) == (nearest, SPREAD)
        assert count <= min(loads) <= nearest.num_tokens // count * (count - 1)
    else:
        assert after == before
    assert after.tokens_per_rank == tuple(loads)
    shuffled_votes, shuffled_keys = list(cast), list(keys)
    order.shuffle(shuffled_votes)
    order.shuffle(shuffled_keys)
    again = decide(shuffled_votes, shuffled_keys, on)
    assert (again.key, again.reason) == (after.key, after.reason)


def test_explain_names_who_is_spread_and_why_others_are_not():
    found = explain([load_shape(load) for load in (63, 97)], [PLAIN, TWIN], ON)
    assert (found.decision.key, found.decision.reason) == (TWIN, SPREAD)
    assert found.why == (
        "rank 0 has too few tokens to reach the last microbatch, and what it has is spread over "
        "all 2 (--dbo-spread-real-tokens)"
    )
    assert found.why_unsplit == ""
    both = explain([load_shape(load) for load in (40, 97, 64)], [TWIN], ON)
    assert both.why.startswith("ranks 0, 2 have too few tokens")
    longer = [decode_key(64, query_len=2), decode_key(64, query_len=2, num_microbatches=2)]
    refused = explain([decode(32, 2), decode(60, 2)], longer, ON)
    assert refused.why_unsplit.endswith("only a twin of one token a request is spread")


@pytest.mark.parametrize(
    ("real", "padded", "count", "loads"),
    [(63, 128, 2, [32, 31]), (65, 128, 2, [64, 1]), (4, 7, 3, [2, 1, 1]), (1, 8, 2, [1, 0])],
)
def test_loads_of_spread_microbatches_are_even(real, padded, count, loads):
    assert microbatch_loads(real, padded, count, spread=True) == loads


LIMITS = Limits(max_num_seqs=20, max_num_batched_tokens=64)


def search_config(count, *, spread=True):
    return MicrobatchConfig(
        enabled=True,
        num_microbatches=count,
        decode_token_threshold=count,
        prefill_token_threshold=count,
        spread_real_tokens=spread,
    )


def looked_for(config, rule=searching.as_built):
    keys = plan(seqs=20, tokens=64, microbatch=config).keys
    return search(keys, LIMITS, config, num_ranks=2, seed=3, rule=rule)


@pytest.mark.parametrize("count", range(2, 6))
def test_search_finds_nothing_over_all_small_loads(count, monkeypatch):
    monkeypatch.setattr(searching, "DRAWN_MIXED", 400)
    seen = set()

    def noting(rank, cast, keys, config):
        decision = decide(cast, keys, config)
        seen.add(decision.reason)
        return decision

    assert looked_for(search_config(count), noting).finding is None
    assert SPREAD in seen


def test_search_finds_a_rule_that_spreads_too_few_tokens_or_unasked():
    def always(rank, cast, keys, config):
        decision = decide(cast, keys, config)
        twins = [key for key in keys if key.is_twin and key.num_tokens >= decision.key.num_tokens]
        loads = decision.tokens_per_rank
        if not twins or not max(loads) or any(vote.shape.num_prefills for vote in cast):
            return decision
        twin = min(twins, key=lambda key: key.num_tokens)
        return dataclasses.replace(decision, key=twin, reason=SPREAD)

    few = looked_for(search_config(2), always).finding
    assert [shape.num_tokens for shape in few.shapes] in ([0, 1], [1, 0], [1, 1])
    assert "has no token" in few.problem or "not of one token" in few.problem
    unasked = looked_for(search_config(2, spread=False), always).finding
    assert "no setting or twin allows" in unasked.problem


def test_every_pair_of_small_loads_keeps_both_microbatches_filled():
    config = search_config(3)
    keys = plan(seqs=20, sizes=(7, 20), microbatch=config).keys
    spread = 0
    for loads in itertools.product(range(1, 21), repeat=2):
        key, reason = decided([decode(load) for load in loads], keys, config)
        if min(loads) >= 3:
            assert key.is_twin, loads
            spread += reason is SPREAD
    assert spread > 100
