import pytest

from cgprof.graphs.dispatch import eager_key
from cgprof.graphs.explain import explain, load_shape, microbatch_loads, worst_padding
from cgprof.shapes import CapturePolicy, DecisionReason
from tests.support.graphs import DBO, NO_DBO, decode, decode_key, plan, prefill

PLAIN, TWIN = decode_key(128), decode_key(128, num_microbatches=2)
SMALL = DBO.model_copy(update={"decode_token_threshold": 2})


def explained(loads, keys=(PLAIN, TWIN), config=DBO):
    return explain([load_shape(load) for load in loads], keys, config)


@pytest.mark.parametrize("small", [63, 64])
def test_refused_twin_names_the_rank_and_where_the_last_microbatch_starts(small):
    found = explained([128, small])
    assert (found.decision.key, found.decision.reason) == (PLAIN, DecisionReason.EMPTY_MICROBATCH)
    assert found.why_unsplit.startswith(f"rank 1: {small} tokens; the last of 2 microbatches")
    assert f"{TWIN} takes those after the first 64" in found.why_unsplit
    assert "all ranks replay the plain key of 128 tokens" in found.why
    eager = explained([128, small], [TWIN])
    assert eager.decision.key == eager_key(128)
    assert "all ranks run eager, unsplit" in eager.why


@pytest.mark.parametrize("small", [65, 128])
def test_twin_that_serves_has_no_reason_against_it(small):
    found = explained([small, 128])
    assert (found.decision.key, found.why_unsplit) == (TWIN, "")
    assert "more than the first 64" in found.why
    assert [rank.why_unsplit for rank in found.ranks] == ["", ""]


def test_rank_below_the_threshold_is_named_as_the_one_that_refused():
    found = explained([64, 7], plan(sizes=(8, 64), microbatch=DBO).keys)
    assert found.decision.key == decode_key(64)
    assert found.why_unsplit == "rank 1: 7 tokens; a split takes 32 tokens (decode)"
    assert [rank.alone for rank in found.ranks] == [decode_key(64), decode_key(8)]
    assert "smallest captured key that holds 64 tokens and 64 requests" in found.why


def test_idle_rank_is_named_as_the_one_that_refused():
    found = explained([64, 0], plan(microbatch=DBO).keys)
    assert found.why_unsplit == "rank 1: idle"
    assert found.ranks[1].alone is None
    none = explained([0, 0])
    assert none.why == "no rank has a token to compute"


def test_ranks_of_unlike_kinds_need_the_threshold_of_other_steps():
    found = explain([decode(64), prefill(600)], plan(microbatch=DBO).keys, DBO)
    assert found.decision.reason is DecisionReason.RANK_EAGER
    assert found.why.startswith("rank 1 has no graph for its own batch")
    assert found.why_unsplit.startswith("rank 0: 64 tokens; over all ranks a step needs 512")


def test_split_without_a_twin_is_eager_or_left_to_the_plain_key():
    keys = plan(microbatch=DBO).keys
    eager = explain([prefill(600)], keys, DBO)
    assert eager.decision.key == eager_key(600, 2)
    assert eager.why.startswith("no twin holds 600 tokens")
    assert eager.why_unsplit == ""
    left = explained([64], [decode_key(64)])
    assert left.why_unsplit.startswith("no twin holds 64 tokens and 64 requests of query length 1")


def test_ranks_that_each_have_a_graph_may_have_none_together():
    keys = plan(CapturePolicy.FULL_DECODE_ONLY, sizes=(8,), query_lens=(1, 2)).keys
    found = explain([decode(4), decode(2, 2)], keys, NO_DBO)
    assert found.decision.reason is DecisionReason.NO_FIT
    assert all(rank.alone is not None for rank in found.ranks)
    assert found.why == (
        "no captured key holds 4 tokens and 4 requests of unlike query lengths; all ranks run eager"
    )
    assert found.why_unsplit == "dual batch overlap is off"


@pytest.mark.parametrize(
    ("tokens", "loads", "why"),
    [(1, None, "fewer than the 2 microbatches"), (2, [1, 1], ""), (3, [1, 2], "")],
)
def test_threshold_of_two_splits_nothing_smaller_and_leaves_no_part_empty(tokens, loads, why):
    keys = plan(seqs=4, sizes=(1, 2, 3), microbatch=SMALL).keys
    found = explained([tokens], keys, SMALL)
    assert why in found.why_unsplit
    key = found.decision.key
    assert key.num_microbatches == (1 if loads is None else 2)
    if loads is not None:
        assert microbatch_loads(tokens, key.num_tokens, key.num_microbatches) == loads


@pytest.mark.parametrize(
    ("real", "padded", "count", "loads"),
    [
        (63, 128, 2, [63, 0]),
        (64, 128, 2, [64, 0]),
        (65, 128, 2, [64, 1]),
        (7, 7, 3, [2, 2, 3]),
        (0, 8, 2, [0, 0]),
    ],
)
def test_microbatch_loads_give_the_last_one_the_rest(real, padded, count, loads):
    assert microbatch_loads(real, padded, count) == loads


def test_load_shape_is_a_decode_step_unless_a_prompt_chunk_joins():
    assert load_shape(8) == decode(8)
    assert load_shape(8, query_len=2) == decode(4, 2)
    assert load_shape(0).uniform_query_len is None
    mixed = load_shape(8, prefill_tokens=5)
    assert (mixed.num_reqs, mixed.num_tokens, mixed.max_query_len) == (9, 13, 5)
    assert mixed.uniform_query_len is None
    assert load_shape(0, prefill_tokens=1).uniform_query_len is None


def test_worst_padding_is_that_of_the_batch_which_is_padded_most():
    keys = [decode_key(size) for size in (64, 8, 2)]
    assert worst_padding(keys, 64, NO_DBO) == (9, 64)
    assert worst_padding(keys, 8, NO_DBO) == (3, 8)
    assert worst_padding([], 8, NO_DBO) is None
