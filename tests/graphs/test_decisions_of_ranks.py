"""What has to hold for any loads of any number of ranks, by brute force and by search."""

import itertools
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgprof.config.schema import MicrobatchConfig, TwinPolicy
from cgprof.graphs.dispatch import choose, decide
from cgprof.shapes import BatchShape, CapturePolicy, DecisionReason, GraphKey, RuntimeMode
from tests.support.children import environment
from tests.support.graphs import decode, plan, prefill, votes

SIZE_SETS = [(4, 8), (1, 2, 3, 5, 7), (6, 9, 12), (5, 11)]


def dbo(num_microbatches, threshold=1, twins=TwinPolicy.BOTH):
    return MicrobatchConfig(
        enabled=True,
        num_microbatches=num_microbatches,
        decode_token_threshold=threshold,
        prefill_token_threshold=threshold,
        twins=twins,
    )


def rows_of_microbatches(padded, load, num_microbatches):
    """The real rows in each microbatch: cut the padded rows, count those below the load."""
    width = padded // num_microbatches
    owners = [min(row // width, num_microbatches - 1) for row in range(padded)]
    return [owners[:load].count(index) for index in range(num_microbatches)]


def check(shapes, keys, config):
    """Checks one decision from first principles and returns it."""
    decision = decide(votes(shapes, keys, config), keys, config)
    key, loads = decision.key, [shape.num_tokens for shape in shapes]
    assert decision.tokens_per_rank == tuple(loads)
    if key.mode is RuntimeMode.NONE:
        assert key.num_tokens == max(loads)
    else:
        assert key in keys
        assert all(key.covers(shape) for shape in shapes if shape.num_tokens)
    if key.num_microbatches > 1:
        assert key.num_microbatches == config.num_microbatches
        for load in loads:
            rows = rows_of_microbatches(key.num_tokens, load, key.num_microbatches)
            assert min(rows) > 0, (key, loads, rows)
            assert sum(rows) == load
    return decision


@pytest.mark.parametrize("num_microbatches", [2, 3, 4])
@pytest.mark.parametrize("sizes", SIZE_SETS)
@pytest.mark.parametrize("twins", TwinPolicy)
def test_every_pair_of_loads_keeps_all_microbatches_filled(sizes, num_microbatches, twins):
    config = dbo(num_microbatches, threshold=num_microbatches, twins=twins)
    keys = plan(seqs=max(sizes), sizes=sizes, microbatch=config).keys
    reasons = set()
    # Loads beyond the largest key too: those run as an eager split.
    for loads in itertools.product(range(max(sizes) + 5), repeat=2):
        decision = check([decode(load) for load in loads], keys, config)
        reasons.add((decision.key.mode, decision.key.num_microbatches, decision.reason))
    split = config.num_microbatches
    assert (RuntimeMode.FULL, split, DecisionReason.GRAPH) in reasons
    assert (RuntimeMode.NONE, split, DecisionReason.NO_FIT) in reasons
    assert DecisionReason.EMPTY_MICROBATCH in {reason for _, _, reason in reasons}


@pytest.mark.parametrize("num_ranks", range(2, 9))
@pytest.mark.parametrize("num_microbatches", [2, 3, 4])
def test_loads_around_each_border_keep_all_microbatches_filled(num_ranks, num_microbatches):
    config = dbo(num_microbatches, threshold=num_microbatches)
    keys = plan(seqs=16, sizes=(8, 13, 16), microbatch=config).keys
    borders = {0, 1, 16, 17}
    for size in (8, 13, 16):
        last = size // num_microbatches * (num_microbatches - 1)
        borders |= {last, last + 1, size}
    for loads in itertools.combinations_with_replacement(sorted(borders), min(num_ranks, 4)):
        # More than four ranks: the middle load is that of all the others.
        others = [loads[len(loads) // 2]] * (num_ranks - len(loads))
        check([decode(load) for load in (*loads, *others)], keys, config)


def shapes_of_a_rank():
    return st.one_of(
        st.builds(decode, st.integers(0, 40), st.sampled_from([1, 1, 1, 2, 3])),
        st.builds(prefill, st.integers(3, 90), st.integers(1, 3)),
        st.builds(
            BatchShape,
            num_reqs=st.integers(1, 6),
            num_tokens=st.integers(6, 60),
            max_query_len=st.integers(1, 60),
            num_prefills=st.integers(0, 2),
        ),
    )


def any_key():
    """Also keys that no plan has: what decides must not rely on the plan's habits."""
    return st.builds(
        GraphKey,
        mode=st.sampled_from([RuntimeMode.PIECEWISE, RuntimeMode.FULL]),
        num_tokens=st.integers(4, 64),
        num_reqs=st.none() | st.integers(1, 40),
        uniform_query_len=st.none() | st.integers(1, 3),
        num_microbatches=st.integers(1, 4),
    )


@settings(max_examples=300)
@given(
    shapes=st.lists(shapes_of_a_rank(), min_size=2, max_size=8),
    num_microbatches=st.integers(2, 4),
    threshold=st.integers(1, 40),
    twins=st.sampled_from(TwinPolicy),
    policy=st.sampled_from([CapturePolicy.FULL, CapturePolicy.FULL_DECODE_ONLY]),
    sizes=st.none() | st.sets(st.integers(1, 120), min_size=1, max_size=5).map(tuple),
    lost=st.sets(st.integers(0, 20)),
)
def test_decisions_over_any_plan_and_ranks_are_safe(
    shapes, num_microbatches, threshold, twins, policy, sizes, lost
):
    config = dbo(num_microbatches, threshold, twins)
    planned = plan(policy, seqs=40, sizes=sizes, microbatch=config, query_lens=(1, 3)).keys
    # Some captures failed on a rank, and were dropped on all.
    agreed = [key for index, key in enumerate(planned) if index not in lost]
    check(shapes, agreed, config)


@settings(max_examples=300)
@given(
    shapes=st.lists(shapes_of_a_rank(), min_size=2, max_size=8),
    keys=st.lists(any_key(), max_size=8, unique=True),
    num_microbatches=st.integers(2, 4),
    threshold=st.integers(1, 40),
    order=st.randoms(use_true_random=False),
)
def test_a_decision_depends_on_votes_and_the_set_of_keys_alone(
    shapes, keys, num_microbatches, threshold, order
):
    config = dbo(num_microbatches, threshold)
    decision = check(shapes, keys, config)
    cast = votes(shapes, keys, config)
    assert decide(cast, keys, config) == decision
    shuffled = list(keys)
    order.shuffle(shuffled)
    assert votes(shapes, shuffled, config) == cast
    assert decide(cast, shuffled, config) == decision
    assert decide(tuple(cast), frozenset(keys), config) == decision
    turned = [*cast[1:], cast[0]]
    again = decide(turned, keys, config)
    assert (again.key, again.reason) == (decision.key, decision.reason)


def test_of_two_keys_of_one_size_the_one_of_fewer_requests_wins_in_any_order():
    few = GraphKey(mode=RuntimeMode.FULL, num_tokens=8, num_reqs=4)
    many = GraphKey(mode=RuntimeMode.FULL, num_tokens=8, num_reqs=8)
    assert choose(prefill(6, 2), [few, many]) is few
    assert choose(prefill(6, 2), [many, few]) is few
    assert choose(prefill(6, 5), [few, many]) is many


SCRIPT = """
from itertools import product
from cgprof.config.schema import CaptureConfig, Limits, MicrobatchConfig
from cgprof.graphs.dispatch import decide, vote
from cgprof.graphs.plan import make_plan
from cgprof.shapes import BatchShape, CapturePolicy
config = MicrobatchConfig(enabled=True, decode_token_threshold=2)
limits = Limits(max_num_seqs=12)
plan = make_plan(CapturePolicy.FULL, limits, CaptureConfig(sizes=(4, 8, 12)), config)
keys = frozenset(plan.keys)
for loads in product(range(14), repeat=2):
    shapes = [BatchShape(num_reqs=n, num_tokens=n, max_query_len=1) for n in loads]
    print(decide([vote(shape, keys, config) for shape in shapes], keys, config))
"""


def test_processes_of_unlike_hash_seeds_decide_alike():
    outputs = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, **environment(), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert outputs.pop().count("StepDecision(") == 14 * 14
