import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgprof.config.schema import MicrobatchConfig
from cgprof.microbatch.rule import last_microbatch_is_empty, wants_split

ON = MicrobatchConfig(enabled=True, decode_token_threshold=32, prefill_token_threshold=512)


@pytest.mark.parametrize(
    ("num_tokens", "uniform", "expected"),
    [(31, True, False), (32, True, True), (511, False, False), (512, False, True)],
)
def test_wants_split_starts_at_the_threshold_of_its_kind(num_tokens, uniform, expected):
    assert wants_split(num_tokens, uniform=uniform, config=ON) is expected


def test_wants_split_is_never_true_when_disabled():
    off = ON.model_copy(update={"enabled": False})
    assert not any(wants_split(n, uniform=u, config=off) for n in (32, 512, 4096) for u in (0, 1))


@pytest.mark.parametrize("threshold", [-1, 0, 1, 2])
def test_wants_split_needs_a_token_for_each_microbatch(threshold):
    config = MicrobatchConfig(enabled=True, decode_token_threshold=threshold)
    assert not wants_split(0, uniform=True, config=config)
    assert not wants_split(1, uniform=True, config=config)
    assert wants_split(2, uniform=True, config=config)
    assert wants_split(3, uniform=True, config=config)
    three = config.model_copy(update={"num_microbatches": 3})
    assert not wants_split(2, uniform=True, config=three)
    assert wants_split(3, uniform=True, config=three)


@pytest.mark.parametrize(
    ("num_real", "num_padded", "empty"),
    [(63, 128, True), (64, 128, True), (65, 128, False), (128, 128, False), (33, 128, True)],
)
def test_last_microbatch_of_two_needs_more_than_half(num_real, num_padded, empty):
    assert last_microbatch_is_empty(num_real, num_padded, 2) is empty


@given(
    num_microbatches=st.integers(2, 8),
    num_padded=st.integers(1, 600),
    fraction=st.floats(0, 1),
)
def test_last_microbatch_agrees_with_a_count_of_its_real_rows(
    num_microbatches, num_padded, fraction
):
    num_padded = max(num_padded, num_microbatches)
    num_real = round(fraction * num_padded)
    width = num_padded // num_microbatches
    owner = [min(row // width, num_microbatches - 1) for row in range(num_padded)]
    is_empty = num_microbatches - 1 not in owner[:num_real]
    assert last_microbatch_is_empty(num_real, num_padded, num_microbatches) is is_empty


@pytest.mark.parametrize("num_tokens", [2, 3])
def test_two_and_three_tokens_split_without_an_empty_part(num_tokens):
    assert not last_microbatch_is_empty(num_tokens, num_tokens, 2)
