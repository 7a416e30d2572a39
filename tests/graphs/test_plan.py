import dataclasses

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cgprof.config.schema import MicrobatchConfig, TwinPolicy
from cgprof.errors import ConfigError
from cgprof.graphs.dispatch import choose, decide
from cgprof.graphs.plan import default_sizes
from cgprof.shapes import CapturePolicy, DecisionReason
from tests.support.graphs import DBO, decode, plan, votes

FULL = CapturePolicy.FULL


def tokens(keys):
    return sorted(key.num_tokens for key in keys)


def test_plan_of_the_default_run_has_the_known_numbers():
    decode_only = plan(microbatch=DBO)
    assert (len(decode_only.plain), len(decode_only.twins)) == (35, 29)
    assert tokens(decode_only.twins) == [*range(32, 249, 8), 256]
    full = plan(FULL, microbatch=DBO)
    assert len(full.plain) == 51
    assert len(full.twins) == 29
    assert tokens(full.plain)[-1] == 512


def test_default_sizes_of_eight_requests():
    assert default_sizes(8, 2048) == [1, 2, 4, 8, 16]
    assert tokens(plan(seqs=8).plain) == [1, 2, 4, 8]


def test_plan_for_verifying_two_drafts_rounds_to_multiples_of_three():
    plain = plan(query_lens=(3,)).plain
    assert all(key.num_tokens == 3 * key.num_reqs for key in plain)
    assert all(key.uniform_query_len == 3 for key in plain)
    assert len({key.num_tokens for key in plain}) == len(plain)
    assert tokens(plain)[-1] == 768


@pytest.mark.parametrize(
    ("seqs", "query_len", "sizes", "found"),
    [
        (8, 3, (1, 2, 4, 8, 16, 24), [3, 6, 9, 18, 24]),
        (1, 4, None, [4]),
        (6, 7, None, [7, 14, 28, 42]),
    ],
)
def test_plan_of_uniform_lengths_is_exact(seqs, query_len, sizes, found):
    planned = plan(seqs=seqs, query_lens=(query_len,), sizes=sizes)
    covered = tokens(planned.plain)
    assert set(found) <= set(covered)
    assert covered[-1] == found[-1]
    assert sizes is None or covered == found
    assert planned.uncovered_batches == ()


def test_plan_prefers_a_padded_uniform_key_for_four_requests_of_three():
    planned = plan(seqs=8, query_lens=(3,), sizes=(1, 2, 4, 8, 16, 24))
    assert choose(decode(4, 3), planned.keys).num_tokens == 18


def test_plan_covers_the_widest_batch_above_the_usual_cap():
    planned = plan(seqs=32, query_lens=(17,))
    assert tokens(planned.plain)[-1] == 544
    assert planned.uncovered_batches == ()


@pytest.mark.parametrize("seqs", [12, 20, 300, 600])
@pytest.mark.parametrize("policy", [FULL, CapturePolicy.FULL_DECODE_ONLY])
def test_plan_covers_every_decode_batch_by_default(seqs, policy):
    planned = plan(policy, seqs=seqs)
    assert planned.uncovered_batches == ()
    for num_reqs in range(1, seqs + 1):
        assert choose(decode(num_reqs), planned.keys) is not None


@pytest.mark.parametrize(
    ("seqs", "sizes", "max_size", "uncovered"),
    [
        (12, (1, 2, 4, 8), None, range(9, 13)),
        (20, (1, 2, 4, 8, 16), None, range(17, 21)),
        (300, None, 290, range(289, 301)),
        (300, None, 300, range(0)),
    ],
)
def test_plan_names_the_batches_that_a_users_sizes_leave_out(seqs, sizes, max_size, uncovered):
    planned = plan(seqs=seqs, sizes=sizes, max_size=max_size)
    assert planned.uncovered_batches == tuple(uncovered)


def test_plan_skips_the_twin_that_no_step_can_reach_and_says_why():
    skipped = [s for s in plan(FULL, microbatch=DBO).skipped if s.key.num_microbatches > 1]
    assert [s.key.num_tokens for s in skipped] == [512]
    assert "512 tokens over 256 requests" in skipped[0].reason


def test_plan_drops_sizes_above_the_token_budget_and_says_so():
    planned = plan(sizes=(8, 4096), seqs=8)
    assert tokens(planned.plain) == [8]
    assert [(s.key.num_tokens, "2048" in s.reason) for s in planned.skipped] == [(4096, True)]


def test_plan_refuses_settings_that_disagree():
    with pytest.raises(ConfigError, match="below max_num_seqs"):
        plan(seqs=256, tokens=255)
    with pytest.raises(ConfigError, match="disagrees"):
        plan(sizes=(1, 2, 4), max_size=8)


def test_plan_of_no_graphs_is_empty():
    empty = plan(CapturePolicy.NONE, microbatch=DBO)
    assert (empty.keys, empty.uncovered_batches) == ((), ())


@pytest.mark.parametrize(
    ("policy", "plain"),
    [
        (TwinPolicy.BOTH, 35),
        (TwinPolicy.TWIN_ONLY, 35 - 29),
        (TwinPolicy.BAND, 35 - 29 + 5),  # 32, 40, 48, 56 and 64 stay
    ],
)
def test_plan_keeps_the_plain_keys_that_the_twin_policy_names(policy, plain):
    planned = plan(microbatch=DBO.model_copy(update={"twins": policy}))
    assert (len(planned.plain), len(planned.twins)) == (plain, 29)
    assert len(planned.skipped) == 35 - plain


def test_plan_orders_plain_keys_then_twins_largest_first():
    for policy in (FULL, CapturePolicy.FULL_DECODE_ONLY):
        planned = plan(policy, microbatch=DBO)
        assert planned.keys == planned.plain + planned.twins
        for part in (planned.plain, planned.twins):
            assert [key.num_tokens for key in part] == tokens(part)[::-1]


def test_plan_is_pure_and_its_fingerprint_follows_the_keys():
    first, again = plan(microbatch=DBO), plan(microbatch=DBO)
    assert first == again
    assert first.fingerprint == again.fingerprint
    assert first.fingerprint != plan().fingerprint
    assert len({str(key) for key in first.keys}) == len(first.keys)
    shorter = dataclasses.replace(first, keys=first.keys[1:])
    assert shorter.fingerprint != first.fingerprint


@given(
    seqs=st.integers(1, 40),
    query_len=st.integers(1, 4),
    threshold=st.integers(2, 40),
    num_microbatches=st.integers(2, 5),
    twins=st.sampled_from(TwinPolicy),
    policy=st.sampled_from([FULL, CapturePolicy.FULL_DECODE_ONLY]),
    sizes=st.none() | st.sets(st.integers(1, 160), min_size=1, max_size=6).map(tuple),
)
def test_every_planned_twin_is_reached_by_some_vote(
    seqs, query_len, threshold, num_microbatches, twins, policy, sizes
):
    config = MicrobatchConfig(
        enabled=True,
        decode_token_threshold=threshold,
        num_microbatches=num_microbatches,
        twins=twins,
    )
    assume(sizes is None or policy is FULL or min(sizes) <= seqs)
    planned = plan(
        policy, seqs=seqs, sizes=sizes, microbatch=config, query_lens=tuple({1, query_len})
    )
    for twin in planned.twins:
        shape = decode(twin.num_reqs, twin.uniform_query_len)
        decision = decide(votes([shape], planned.keys, config), planned.keys, config)
        assert (decision.key, decision.reason) == (twin, DecisionReason.GRAPH)


@pytest.mark.parametrize(("policy", "size"), [(FULL, 10**8), (CapturePolicy.FULL_DECODE_ONLY, 9)])
def test_plan_refuses_sizes_that_give_no_key(policy, size):
    with pytest.raises(ConfigError, match=rf"{size} gives.*max_num_seqs is 8.*tokens 2048"):
        plan(policy, seqs=8, sizes=(size,))


def test_larger_maximum_extends_the_default_sizes():
    assert tokens(plan(FULL, max_size=600).plain)[-6:] == [528, 544, 560, 576, 592, 600]
    assert tokens(plan(FULL, seqs=8, max_size=300).plain)[-3:] == [272, 288, 300]
    assert len(plan(FULL, max_size=512).plain) == 51


@pytest.mark.parametrize(
    ("policy", "max_size", "largest", "reason"),
    [
        (FULL, 3000, 2048, "above max_num_batched_tokens 2048"),
        (CapturePolicy.FULL_DECODE_ONLY, 600, 256, "max_num_seqs is 256"),
    ],
)
def test_maximum_that_cannot_be_reached_is_listed_as_skipped(policy, max_size, largest, reason):
    planned = plan(policy, max_size=max_size)
    assert tokens(planned.plain)[-1] == largest
    assert [s.key.num_tokens for s in planned.skipped] == [max_size]
    assert reason in planned.skipped[0].reason
