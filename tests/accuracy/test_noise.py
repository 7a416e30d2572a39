import pytest
import torch

from cgprof.accuracy.noise import (
    FLOOR_FACTOR,
    LEAST_ALLOWED,
    MOST_ALLOWED,
    Distance,
    allowance,
    block_sums,
    distance,
    token_errors,
)


def test_error_of_a_token_is_relative_to_its_own_reference():
    reference = torch.tensor([[3.0, 4.0], [300.0, 400.0], [1.0, 0.0]])
    hidden = reference + torch.tensor([[0.5, 0.0], [0.5, 0.0], [0.0, 0.0]])
    assert token_errors(hidden, reference).tolist() == pytest.approx([0.1, 0.001, 0.0])


def test_distance_keeps_the_worst_and_the_median_apart():
    assert distance(torch.tensor([0.1, 0.9, 0.2])) == Distance(
        worst=pytest.approx(0.9), median=pytest.approx(0.2)
    )


def test_nan_is_within_nothing():
    found = distance(token_errors(torch.tensor([[float("nan")]]), torch.ones(1, 1)))
    assert not found.within(Distance(worst=1e9, median=1e9))


def test_small_fault_in_all_tokens_shows_where_the_worst_token_hides_it():
    allowed = Distance(worst=1.0, median=0.1)
    assert Distance(worst=0.9, median=0.05).within(allowed)
    assert not Distance(worst=0.5, median=0.2).within(allowed)
    assert not Distance(worst=1.1, median=0.05).within(allowed)


def test_allowance_is_the_floor_times_its_factor_or_the_least_of_the_dtype():
    floor = Distance(worst=0.1, median=1e-12)
    allowed = allowance(floor, torch.bfloat16)
    assert allowed.worst == FLOOR_FACTOR * 0.1
    assert allowed.median == LEAST_ALLOWED[torch.bfloat16]


def test_row_of_zeros_is_never_allowed():
    allowed = allowance(Distance(worst=0.9, median=0.9), torch.bfloat16)
    assert allowed.worst == MOST_ALLOWED
    zeros = distance(token_errors(torch.zeros(2, 3), torch.ones(2, 3)))
    assert not zeros.within(allowed)


def test_floor_of_nan_allows_nothing():
    nan = float("nan")
    allowed = allowance(Distance(worst=nan, median=nan), torch.float32)
    assert not Distance(worst=0.0, median=0.0).within(allowed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_block_sums_show_one_changed_value_in_its_block_only(dtype):
    cache = torch.randn(3, 5, 2, 4, 2, 8).to(dtype)
    blocks = torch.tensor([0, 2, 4])
    before = block_sums(cache, blocks)
    assert before.shape == (3, 3)
    cache[1, 2, 1, 3, 0, 7] += 1
    cache[2, 3] += 1  # not watched
    changed = block_sums(cache, blocks) != before
    assert changed.nonzero().tolist() == [[1, 1]]


def test_block_sums_show_values_that_change_places():
    cache = torch.randn(1, 1, 2, 4, 2, 8)
    before = block_sums(cache, torch.tensor([0]))
    cache[0, 0, 0, [0, 1]] = cache[0, 0, 0, [1, 0]]
    assert (block_sums(cache, torch.tensor([0])) != before).all()


def test_block_sums_of_nan_are_stable_and_see_it_overwritten():
    cache = torch.full((1, 1, 2, 4, 2, 8), float("nan"))
    before = block_sums(cache, torch.tensor([0]))
    assert (block_sums(cache, torch.tensor([0])) == before).all()
    cache[0, 0, 0, 0, 0, 0] = 0.0
    assert (block_sums(cache, torch.tensor([0])) != before).all()
