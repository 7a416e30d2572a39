import numpy as np
import pytest

from cgprof.accuracy.cases import cases_for, fewest_requests, make_filling
from cgprof.accuracy.stream import random_case
from cgprof.config.schema import CaptureConfig, Limits, MicrobatchConfig
from cgprof.graphs.plan import make_plan
from cgprof.microbatch.rule import last_microbatch_is_empty
from cgprof.shapes import CapturePolicy, GraphKey, RuntimeMode

CONTEXTS = (1, 15, 16, 17, 257, 4096)
LIMITS = Limits(max_num_seqs=32, max_num_batched_tokens=128, max_model_len=4352)


def plan(policy=CapturePolicy.FULL, limits=LIMITS):
    return make_plan(policy, limits, CaptureConfig(), MicrobatchConfig(enabled=True))


def filling_of(keys, limits=LIMITS, num_blocks=10**6, max_varied=32):
    return make_filling(keys, limits, CONTEXTS, num_blocks=num_blocks, max_varied=max_varied)


def kinds(cases):
    return [case.kind for case in cases]


def test_filling_has_every_context_and_one_long_request():
    filling = filling_of(plan().keys)
    assert set(filling.contexts) == set(CONTEXTS)
    assert filling.contexts.count(4096) == 1
    assert filling.contexts.count(257) > 1
    assert len(filling.contexts) == 32


def test_filling_clips_contexts_to_what_a_request_may_hold():
    limits = LIMITS.model_copy(update={"max_model_len": 100})
    filling = filling_of(plan(limits=limits).keys, limits)
    sums = np.array(filling.contexts) + np.array(filling.query_lens)
    assert sums.max() == 100
    assert min(filling.contexts) >= 1
    assert {15, 16, 17} <= set(filling.contexts)


def test_filling_varies_only_as_many_requests_as_asked():
    filling = filling_of(plan().keys, max_varied=16)
    assert set(filling.contexts[16:]) == {1}
    assert set(filling.contexts[:16]) == set(CONTEXTS)


def test_filling_gives_up_long_contexts_that_the_cache_cannot_hold():
    keys = plan(CapturePolicy.FULL_DECODE_ONLY).keys
    filling = filling_of(keys, num_blocks=120)
    blocks = sum(
        -(-(c + q) // 16) for c, q in zip(filling.contexts, filling.query_lens, strict=True)
    )
    assert blocks <= 120
    assert 4096 not in filling.contexts
    assert {1, 15, 16, 17, 257} <= set(filling.contexts)


@pytest.mark.parametrize("policy", [CapturePolicy.FULL, CapturePolicy.FULL_DECODE_ONLY])
def test_every_case_fits_its_key_and_the_filling(policy):
    keys = plan(policy).keys
    filling = filling_of(keys)
    for key in keys:
        cases = cases_for(key, filling)
        for case in cases:
            assert len(set(case.indices)) == len(case.indices) == len(case.query_lens)
            assert case.num_tokens <= key.num_tokens
            assert len(case.indices) <= key.num_reqs
            for index, length in zip(case.indices, case.query_lens, strict=True):
                assert 1 <= length <= filling.query_lens[index]
            if key.uniform_query_len is not None:
                assert set(case.query_lens) == {key.uniform_query_len}
        assert cases[0].num_tokens == cases[-1].num_tokens == key.num_tokens


@pytest.mark.parametrize("policy", [CapturePolicy.FULL, CapturePolicy.FULL_DECODE_ONLY])
def test_every_key_sees_every_context(policy):
    keys = plan(policy).keys
    filling = filling_of(keys)
    for key in keys:
        seen = {filling.contexts[i] for case in cases_for(key, filling) for i in case.indices}
        assert seen == set(CONTEXTS), key


def test_buffer_shrinks_after_two_full_steps_and_grows_again():
    key = GraphKey(mode=RuntimeMode.FULL, num_tokens=8, num_reqs=8, uniform_query_len=1)
    cases = cases_for(key, filling_of([key]))
    assert kinds(cases) == ["full", "full", "shrunk", "full"]
    assert [len(case.indices) for case in cases] == [8, 8, 3, 8]
    assert cases[2].indices != cases[0].indices[:3]
    assert [case.is_padded(key) for case in cases] == [False, False, True, False]


@pytest.mark.parametrize("num_microbatches", [2, 3, 4])
@pytest.mark.parametrize("num_reqs", [4, 7, 8, 31])
def test_shrunk_twin_leaves_one_real_token_in_its_last_microbatch(num_reqs, num_microbatches):
    key = GraphKey(
        mode=RuntimeMode.FULL,
        num_tokens=num_reqs,
        num_reqs=num_reqs,
        uniform_query_len=1,
        num_microbatches=num_microbatches,
    )
    fewest = fewest_requests(key, [1] * num_reqs)
    assert not last_microbatch_is_empty(fewest, num_reqs, num_microbatches)
    assert last_microbatch_is_empty(fewest - 1, num_reqs, num_microbatches)
    rng = np.random.default_rng(0)
    filling = filling_of([key])
    for _ in range(50):
        case = random_case(key, filling, rng)
        assert not last_microbatch_is_empty(case.num_tokens, num_reqs, num_microbatches)


def test_key_of_any_mix_also_runs_one_request_and_a_chunk_beside_decodes():
    key = GraphKey(mode=RuntimeMode.FULL, num_tokens=48, num_reqs=32)
    cases = {case.kind: case for case in cases_for(key, filling_of([key]))}
    assert cases["one request"].query_lens == (48,)
    mixed = cases["chunk beside decodes"]
    assert mixed.num_tokens == 48
    assert mixed.query_lens[:-1] == (1,) * 24
    assert mixed.query_lens[-1] == 24


def test_key_larger_than_a_request_has_no_case_of_one_request():
    limits = LIMITS.model_copy(update={"max_model_len": 40})
    key = GraphKey(mode=RuntimeMode.FULL, num_tokens=64, num_reqs=32)
    cases = cases_for(key, filling_of([key], limits))
    assert "one request" not in kinds(cases)
    assert "chunk beside decodes" in kinds(cases)


def test_decode_keys_have_no_prompts():
    key = GraphKey(mode=RuntimeMode.FULL, num_tokens=16, num_reqs=16, uniform_query_len=1)
    assert set(kinds(cases_for(key, filling_of([key])))) == {"full", "shrunk"}
