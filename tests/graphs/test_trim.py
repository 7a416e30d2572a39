import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgprof.config.schema import MicrobatchConfig, TwinPolicy
from cgprof.errors import ConfigError
from cgprof.graphs.dispatch import decide
from cgprof.graphs.plan import CapturePlan
from cgprof.graphs.trim import trim
from cgprof.shapes import BatchShape, CapturePolicy, RuntimeMode
from tests.support.graphs import DBO, NO_DBO, decode, decode_key, plan, votes

FULL, DECODE_ONLY = CapturePolicy.FULL, CapturePolicy.FULL_DECODE_ONLY
NODE_BYTES, POOL_BYTES = 10, 1000


def bytes_of(keys):
    """A pool, and ten bytes a microbatch of each key."""
    return POOL_BYTES + sum(NODE_BYTES * key.num_microbatches for key in keys)


def smallest_of(whole, microbatch, num_ranks=1):
    """The plan that is left when the budget is lowered until it is refused."""
    trimmed, budget = whole, bytes_of(whole.keys)
    while True:
        try:
            trimmed = trim(whole, bytes_of, budget, microbatch, num_ranks=num_ranks)
        except ConfigError:
            return trimmed
        budget = bytes_of(trimmed.keys) - 1


def labels(keys):
    return [str(key) for key in keys]


def test_plan_that_fits_stays_as_it_is():
    whole = plan(FULL, microbatch=DBO)
    assert trim(whole, bytes_of, bytes_of(whole.keys), DBO) is whole


def test_twins_go_first_and_each_time_the_one_that_pads_least():
    whole = plan(sizes=(8, 32, 40, 48, 64, 80), microbatch=DBO)
    gone = []
    for number in range(1, 5):
        budget = bytes_of(whole.keys) - number * 2 * NODE_BYTES
        trimmed = trim(whole, bytes_of, budget, DBO)
        assert trimmed.plain == whole.plain
        (left,) = set(whole.twins) - set(trimmed.twins) - set(gone)
        gone.append(left)
    # 48/40 = 1.2 is least; then 80/64 = 1.25; then 48/32 = 1.5; 80/48 = 1.67 is last of these.
    assert [key.num_tokens for key in gone] == [40, 64, 32, 48]


def test_reason_names_budget_estimate_and_where_the_batches_go():
    whole = plan(sizes=(8, 32, 40, 48), microbatch=DBO)
    mib = 1024**2
    trimmed = trim(whole, lambda keys: len(keys) * mib, 5 * mib, DBO)
    assert {str(one.key): one.reason for one in trimmed.skipped} == {
        "FULL-40x40q1-mb2": "left out to keep graph memory within 5 MiB (estimate with all 7 MiB): "
        "its batches pad to FULL-48x48q1-mb2",
        "FULL-32x32q1-mb2": "left out to keep graph memory within 5 MiB (estimate with all 7 MiB): "
        "its batches pad to FULL-48x48q1-mb2",
    }
    without_twins = trim(whole, lambda keys: len(keys) * mib, 3 * mib, DBO)
    reasons = {str(one.key): one.reason for one in without_twins.skipped}
    assert len(reasons) == 4
    assert reasons["FULL-48x48q1-mb2"].endswith("its batches run unsplit as FULL-48x48q1")
    assert reasons["FULL-40x40q1"].endswith("its batches pad to FULL-48x48q1")
    assert reasons["FULL-40x40q1-mb2"].endswith("its batches run unsplit as FULL-48x48q1")


def test_order_of_keys_and_what_was_skipped_before_stay():
    whole = plan(FULL, sizes=(8, 32, 64, 512), microbatch=DBO)
    trimmed = trim(whole, bytes_of, bytes_of(whole.keys) - 1, DBO)
    assert trimmed.keys == tuple(key for key in whole.keys if key in trimmed.keys)
    assert trimmed.skipped[: len(whole.skipped)] == whole.skipped
    assert len(whole.skipped) > 0


def test_largest_plain_key_of_each_family_stays():
    whole = plan(sizes=(1, 2, 4, 8), seqs=8)
    assert labels(smallest_of(whole, NO_DBO).keys) == ["FULL-8x8q1"]
    verify = plan(seqs=8, query_lens=(1, 3), sizes=(3, 6, 12, 24))
    assert labels(smallest_of(verify, NO_DBO).keys) == ["FULL-24x8q3", "FULL-6x6q1"]


def test_budget_below_what_has_to_stay_is_refused_with_the_bytes():
    whole = plan(sizes=(1, 2, 4, 8), seqs=8)
    kept = smallest_of(whole, NO_DBO)
    with pytest.raises(ConfigError) as caught:
        trim(whole, bytes_of, bytes_of(kept.keys) - 1, NO_DBO)
    message = str(caught.value)
    assert message.startswith("capture.max_graph_memory_bytes (--max-graph-memory): ")
    assert f"({POOL_BYTES + NODE_BYTES - 1} bytes) does not hold what has to stay" in message
    assert f"(FULL-8x8q1): that takes 1010 B ({POOL_BYTES + NODE_BYTES} bytes)" in message


def test_last_twin_without_a_plain_key_stays():
    only = MicrobatchConfig(enabled=True, twins=TwinPolicy.TWIN_ONLY)
    whole = plan(sizes=(8, 24, 32, 40, 64), microbatch=only)
    kept = smallest_of(whole, only)
    # Twin 64 refuses 32 tokens, and would leave them eager: there is no plain key of its size.
    assert labels(kept.keys) == ["FULL-24x24q1", "FULL-64x64q1-mb2", "FULL-40x40q1-mb2"]


def test_spread_tokens_make_a_far_larger_twin_good_enough():
    only = MicrobatchConfig(enabled=True, twins=TwinPolicy.TWIN_ONLY, spread_real_tokens=True)
    whole = plan(sizes=(8, 24, 32, 40, 64), microbatch=only)
    assert labels(smallest_of(whole, only).twins) == ["FULL-64x64q1-mb2"]


def test_plain_key_that_a_refused_twin_falls_back_to_stays():
    split = MicrobatchConfig(enabled=True, decode_token_threshold=3)
    twins = (decode_key(20, num_microbatches=2), decode_key(6, num_microbatches=2))
    keys = (decode_key(8), decode_key(6), decode_key(4), *twins)
    kept = smallest_of(CapturePlan(keys=keys, skipped=(), uncovered_batches=()), split)
    assert kept.keys == (decode_key(8), decode_key(6), *twins)
    assert decide(votes([decode(3)], kept.keys, split), kept.keys, split).key == decode_key(6)


def test_twin_stays_whose_refused_batches_would_lose_its_plain_key():
    band = MicrobatchConfig(enabled=True, decode_token_threshold=4, twins=TwinPolicy.BAND)
    whole = plan(sizes=(2, 8, 9), seqs=9, microbatch=band)
    kept = smallest_of(whole, band)
    assert labels(kept.keys) == ["FULL-8x8q1", "FULL-9x9q1-mb2", "FULL-8x8q1-mb2"]
    assert str(decide(votes([decode(4)], kept.keys, band), kept.keys, band).key) == "FULL-8x8q1"


def test_exact_size_of_a_refused_split_over_ranks_stays():
    split = MicrobatchConfig(enabled=True, decode_token_threshold=64, prefill_token_threshold=4)
    whole = plan(FULL, sizes=(4, 16, 32), seqs=2, microbatch=split)
    shapes = [
        BatchShape(num_reqs=2, num_tokens=16, max_query_len=15, num_prefills=1),
        BatchShape(num_reqs=2, num_tokens=6, max_query_len=5, num_prefills=1),
    ]
    one = smallest_of(whole, split)
    two = smallest_of(whole, split, num_ranks=2)
    assert labels(one.keys) == ["FULL-32x2"]
    assert labels(two.keys) == ["FULL-32x2", "FULL-16x2"]
    assert decide(votes(shapes, two.keys, split), two.keys, split).key == two.keys[1]


sizes = st.lists(st.integers(1, 48), min_size=1, max_size=8, unique=True).map(tuple)


@st.composite
def splits(draw):
    return MicrobatchConfig(
        enabled=draw(st.booleans()),
        num_microbatches=draw(st.integers(2, 4)),
        decode_token_threshold=draw(st.integers(0, 24)),
        prefill_token_threshold=draw(st.integers(0, 40)),
        twins=draw(st.sampled_from(TwinPolicy)),
        spread_real_tokens=draw(st.booleans()),
    )


def is_graph(shapes, keys, microbatch):
    key = decide(votes(shapes, keys, microbatch), keys, microbatch).key
    return key.mode is not RuntimeMode.NONE


@settings(max_examples=40, deadline=None)
@given(
    sizes=sizes,
    microbatch=splits(),
    policy=st.sampled_from([FULL, DECODE_ONLY]),
    seqs=st.sampled_from([6, 24, 48]),
    share=st.floats(0, 1),
)
def test_every_decode_batch_of_one_rank_keeps_a_graph(sizes, microbatch, policy, seqs, share):
    try:
        whole = plan(policy, sizes=sizes, seqs=seqs, tokens=48, microbatch=microbatch)
    except ConfigError:  # no size gives a key
        return
    least = smallest_of(whole, microbatch)
    budget = int(bytes_of(least.keys) + share * (bytes_of(whole.keys) - bytes_of(least.keys)))
    for trimmed in (least, trim(whole, bytes_of, budget, microbatch)):
        assert set(trimmed.keys) <= set(whole.keys)
        for num_reqs in range(1, seqs + 1):
            if is_graph([decode(num_reqs)], whole.keys, microbatch):
                assert is_graph([decode(num_reqs)], trimmed.keys, microbatch), num_reqs


@settings(max_examples=40, deadline=None)
@given(
    sizes=sizes,
    microbatch=splits(),
    policy=st.sampled_from([FULL, DECODE_ONLY]),
    data=st.data(),
)
def test_every_step_of_several_ranks_keeps_a_graph(sizes, microbatch, policy, data):
    try:
        whole = plan(policy, sizes=sizes, seqs=48, tokens=48, microbatch=microbatch)
    except ConfigError:  # no size gives a key
        return
    least = smallest_of(whole, microbatch, num_ranks=2)
    for pair in itertools.combinations_with_replacement(range(0, 49, 3), 2):
        shapes = [decode(load) for load in pair]
        if is_graph(shapes, whole.keys, microbatch):
            assert is_graph(shapes, least.keys, microbatch), pair
    for _ in range(10):
        loads = data.draw(st.lists(st.tuples(st.integers(1, 48), st.integers(1, 48)), min_size=2))
        mixed = [
            BatchShape(
                num_reqs=min(reqs, tokens),
                num_tokens=tokens,
                max_query_len=tokens - min(reqs, tokens) + 1,
                num_prefills=1,
            )
            for tokens, reqs in loads[:3]
        ]
        if is_graph(mixed, whole.keys, microbatch):
            assert is_graph(mixed, least.keys, microbatch), mixed
