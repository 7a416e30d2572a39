import dataclasses

import pytest

from cgprof.config.schema import Limits, MicrobatchConfig, RunConfig
from cgprof.measure.worth_cases import decode_cases, prefill_cases
from tests.support.stepping import full_key


def config(threshold=512, **limits):
    microbatch = MicrobatchConfig(enabled=True, prefill_token_threshold=threshold)
    return RunConfig(limits=Limits(**limits), microbatch=microbatch)


def both(*sizes):
    keys = [full_key(size, parts) for size in sizes for parts in (1, 2)]
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
