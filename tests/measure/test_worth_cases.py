import dataclasses

import pytest

from cgprof.config.schema import Limits, MicrobatchConfig, RunConfig
from cgprof.measure.worth_cases import decode_cases, prefill_cases, spread_cases
from cgprof.shapes import DecisionReason
from tests.support.stepping import full_key


def config(threshold=512, splitting=None, **limits):
    microbatch = MicrobatchConfig(
        enabled=True, prefill_token_threshold=threshold, **(splitting or {})
    )
    return RunConfig(limits=Limits(**limits), microbatch=microbatch)


def both(*sizes, count=2):
    keys = [full_key(size, parts) for size in sizes for parts in (1, count)]
    return [dataclasses.replace(key, uniform_query_len=1) for key in keys]


def sizes(cases):
    return [case.num_tokens for case in cases]


def test_decode_takes_twins_of_powers_of_two_up_to_512():
    keys = both(32, 40, 64, 256, 512, 1024)
    cases, left_out = decode_cases(keys, config(max_num_seqs=1024))
    assert sizes(cases) == [32, 64, 256, 512]
    assert left_out == []
    assert all(case.split.num_microbatches == 2 for case in cases)
    assert all(case.plain.num_microbatches == 1 for case in cases)
    assert sizes(decode_cases(keys, config(max_num_seqs=256))[0]) == [32, 64, 256]


def test_decode_takes_the_largest_odd_sizes_where_there_is_no_power_of_two():
    found, _ = decode_cases(both(*range(33, 63, 5)), config())
    assert sizes(found) == [38, 43, 48, 53, 58]


def test_twin_without_a_plain_key_of_its_size_is_left_out_with_the_reason():
    keys = [key for key in both(32, 64) if key.num_tokens == 64 or key.num_microbatches == 2]
    cases, left_out = decode_cases(keys, config())
    assert sizes(cases) == [64]
    assert left_out == ["decode of 32 tokens: no plain graph and twin of that size"]


def test_nothing_captured_has_no_decode():
    assert decode_cases([], config()) == ([], [])


@pytest.mark.parametrize(
    ("limits", "free", "expected", "stop"),
    [
        ({"max_num_batched_tokens": 8192, "max_model_len": 8192}, 1000,
         [512, 1024, 2048, 4096, 8192], None),
        ({"max_num_batched_tokens": 2048}, 1000, [512, 1024, 2048], "max_num_batched_tokens"),
        ({"max_num_batched_tokens": 8192, "max_num_seqs": 2, "max_model_len": 1024}, 1000,
         [512, 1024, 2048], "max_num_seqs times max_model_len"),
        ({"max_num_batched_tokens": 8192}, 100, [512, 1024], "the KV cache"),
    ],
)  # fmt: skip
def test_prefill_doubles_from_512_as_far_as_the_limits_allow(limits, free, expected, stop):
    cases, left_out = prefill_cases(config(**limits), free)
    assert sizes(cases) == expected
    assert [note.rpartition("beyond ")[2] for note in left_out] == ([stop] if stop else [])
    assert [case.split.num_microbatches for case in cases] == [2] * len(cases)


def test_prefill_has_as_many_prompts_as_their_length_needs():
    cases, _ = prefill_cases(config(max_num_batched_tokens=8192, max_model_len=3000), 10_000)
    assert {case.num_tokens: case.num_reqs for case in cases} == {
        512: 1,
        1024: 1,
        2048: 1,
        4096: 2,
        8192: 3,
    }


def test_prefill_begins_at_a_smaller_threshold():
    assert sizes(prefill_cases(config(24, max_num_batched_tokens=64), 100)[0]) == [24, 48]


def spreads(keys, num_ranks=2, **splitting):
    run = config(splitting={"spread_real_tokens": True, **splitting})
    return spread_cases(decode_cases(keys, run)[0], keys, run, num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_spread_has_full_ranks_and_a_last_one_that_just_misses_its_last_microbatch(num_ranks):
    cases, left_out = spreads(both(64, 128, 256), num_ranks)
    assert left_out == []
    assert [case.tokens_per_rank for case in cases] == [
        (*[size] * (num_ranks - 1), size // 2) for size in (64, 128, 256)
    ]
    for case in cases:
        fallen, kept = case.decided
        assert (fallen.reason, kept.reason) == (
            DecisionReason.EMPTY_MICROBATCH,
            DecisionReason.SPREAD,
        )
        assert (fallen.key, kept.key) == (case.plain, case.split)
        assert (case.plain.num_microbatches, case.split.num_microbatches) == (1, 2)
        assert case.plain.num_tokens == case.split.num_tokens == case.num_tokens
        assert fallen.tokens_per_rank == kept.tokens_per_rank == case.tokens_per_rank


def test_spread_of_more_microbatches_takes_what_misses_the_last_of_them():
    keys = both(64, 128, count=4)
    cases, _ = spreads(keys, num_microbatches=4)
    assert [case.tokens_per_rank for case in cases] == [(64, 48), (128, 96)]
    assert {case.decided[1].reason for case in cases} == {DecisionReason.SPREAD}


def test_size_at_which_spreading_changes_nothing_is_left_out_with_who_did_not_split():
    cases, left_out = spreads(both(32, 64))
    assert sizes(cases) == [64]
    assert left_out == [
        "spread of 32 tokens, 16 on the last rank: FULL-32x32q1 (graph) with spreading and "
        "without, rank 1 is below-threshold"
    ]


def test_twins_of_any_lengths_are_never_spread():
    keys = [dataclasses.replace(key, uniform_query_len=None) for key in both(64)]
    cases, left_out = spreads(keys)
    assert cases == []
    assert len(left_out) == 1
    assert "(empty-microbatch) with spreading and without" in left_out[0]


def test_nothing_is_spread_on_one_rank_which_says_so_or_with_the_setting_off():
    cases, (why,) = spreads(both(64), num_ranks=1)
    assert not cases
    assert why.startswith("spreading: ")
    assert spreads(both(64), spread_real_tokens=False) == ([], [])
