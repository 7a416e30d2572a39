import pytest
import torch

from cgprof.config.schema import All2AllBackend, ParallelConfig
from cgprof.moe.backends import make_dispatcher
from cgprof.moe.dispatcher import LocalDispatcher
from tests.moe.exchanges import (
    BACKENDS,
    Case,
    alone,
    buffer_addresses,
    expert_parts,
    refuse_recording,
    refuse_sizes,
    replay_recorded,
    run_cases,
    run_microbatched,
    sum_planted,
)
from tests.support.builders import tiny_model
from tests.support.ranks import run_ranks

A2A, AG, EXACT = (
    All2AllBackend.ALL_TO_ALL,
    All2AllBackend.ALLGATHER_REDUCESCATTER,
    All2AllBackend.EXACT,
)
CAPTURABLE = (A2A, AG)
# In turn over the same buffers: large, small, large.
TWO = (
    Case(loads=(7, 3), num_tokens=8),
    Case(loads=(1, 1), num_tokens=1, seed=1),
    Case(loads=(5, 0), num_tokens=5, seed=2),
    Case(loads=(6, 8), num_tokens=8, target=5, seed=3),
    Case(loads=(0, 0), num_tokens=2, seed=4),
    Case(loads=(4, 7), num_tokens=7, seed=5),
)
FOUR = (
    Case(loads=(9, 0, 1, 4), num_tokens=9, num_experts=6, top_k=4),
    Case(loads=(0, 0, 1, 0), num_tokens=1, num_experts=6, top_k=4, seed=1),
    Case(loads=(3, 2, 8, 8), num_tokens=8, num_experts=6, top_k=4, target=2, seed=2),
    Case(loads=(8, 7, 8, 5), num_tokens=8, num_experts=6, top_k=4, seed=3),
)
FOUR_APART = (
    Case(loads=(9, 0, 1, 4), num_tokens=9, num_experts=13, top_k=3, one_rank_each=True),
    Case(loads=(2, 9, 9, 3), num_tokens=9, num_experts=13, top_k=3, one_rank_each=True, seed=1),
)


def tolerance(case: Case, rank: int) -> torch.Tensor:
    """How far [T, D] the sum of P rounded sums may be from the sum rounded once.

    Each partial sum is rounded (together at most u A, where A is the sum of the parts' sizes), so
    is each of the P - 1 additions and each result: (P + 2) u A. Orders of the f32 sums add
    2 K u32 A.
    """
    hidden, ids, weights = case.batch(rank)
    sizes = expert_parts(hidden, ids, weights, *case.weights()).abs().sum(dim=1)
    unit, single = (torch.finfo(dtype).eps / 2 for dtype in (case.dtype, torch.float32))
    return ((case.size + 2) * unit + 2 * case.top_k * single) * sizes


def check_cases(backend, cases, *, bitwise):
    size = cases[0].size
    found = run_ranks(size, run_cases, backend, cases)
    for rank in range(size):
        for case, (out, dropped) in zip(cases, found[rank], strict=True):
            expected = alone(case, rank)
            assert dropped == 0
            assert out.dtype is case.dtype
            assert not out[case.loads[rank] :].any(), "padding"
            if bitwise:
                assert torch.equal(out, expected)
            else:
                assert ((out.float() - expected.float()).abs() <= tolerance(case, rank)).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks_equal_one_bit_for_bit_with_two_experts_a_token(backend):
    check_cases(backend, TWO, bitwise=True)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("backend", BACKENDS)
def test_four_ranks_equal_one_bit_for_bit_where_experts_are_of_one_rank(backend):
    check_cases(backend, FOUR_APART, bitwise=True)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("backend", BACKENDS)
def test_four_ranks_equal_one_up_to_the_order_of_sums(backend):
    check_cases(backend, FOUR, bitwise=False)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("backend", BACKENDS)
def test_four_ranks_equal_one_up_to_rounding_in_bfloat16(backend):
    cases = [
        Case(loads=(5, 0, 8, 2), num_tokens=8, top_k=4, dtype=torch.bfloat16, seed=seed)
        for seed in range(2)
    ]
    check_cases(backend, cases, bitwise=False)


@pytest.mark.ranks(4)
def test_all_to_all_and_exact_agree_bit_for_bit():
    first, second = (run_ranks(4, run_cases, backend, FOUR) for backend in (A2A, EXACT))
    for ours, others in zip(first, second, strict=True):
        for (out, _), (other, _) in zip(ours, others, strict=True):
            assert torch.equal(out, other)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("backend", [A2A, EXACT])
def test_sums_come_home_in_rank_order(backend):
    # In any other order of these four the sum is 0 or 2.
    assert run_ranks(4, sum_planted, backend, (1e8, 1.0, -1e8, 1.0)) == [1.0] * 4


@pytest.mark.ranks(2)
def test_rows_beyond_the_capacity_are_dropped_and_counted():
    # Expert 5 is rank 1's; each rank sends it two of its tokens.
    cases = [
        Case(loads=(5, 1), num_tokens=6, target=5),
        Case(loads=(2, 0), num_tokens=2, target=5, seed=1),
        Case(loads=(3, 6), num_tokens=6, target=5, seed=2),
    ]
    found = run_ranks(2, run_cases, A2A, cases, 2)
    assert [dropped for _, dropped in found[0]] == [3, 3, 4]
    assert [dropped for _, dropped in found[1]] == [0, 0, 4]
    for rank in range(2):
        for case, (out, _) in zip(cases, found[rank], strict=True):
            kept = min(2, case.loads[rank])
            assert torch.equal(out[:kept], alone(case, rank)[:kept])
            assert not out[kept:].any()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", [AG, EXACT])
def test_other_exchanges_have_no_capacity(backend):
    case = Case(loads=(6, 3), num_tokens=6, target=5)
    found = run_ranks(2, run_cases, backend, [case], 2)
    assert all(torch.equal(found[rank][0][0], alone(case, rank)) for rank in range(2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cuts", [(4,), (3, 6)])
def test_microbatches_in_flight_equal_one_rank(backend, cuts):
    case = Case(loads=(9, 7), num_tokens=9)
    found = run_ranks(2, run_microbatched, backend, case, cuts)
    assert all(torch.equal(found[rank], alone(case, rank)) for rank in range(2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", CAPTURABLE)
def test_each_microbatch_receives_at_an_address_of_its_own(backend):
    case = Case(loads=(4, 4), num_tokens=4)
    for first, second, first_again, second_again in run_ranks(2, buffer_addresses, backend, case):
        assert first == first_again
        assert second == second_again
        assert first != second


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", CAPTURABLE)
def test_recorded_exchange_replays_with_other_tokens(backend):
    cases = [
        Case(loads=(6, 2), num_tokens=6),
        Case(loads=(1, 6), num_tokens=6, seed=1),
        Case(loads=(0, 4), num_tokens=6, target=1, seed=2),
    ]
    found = run_ranks(2, replay_recorded, backend, cases)
    for rank in range(2):
        for case, out in zip(cases, found[rank], strict=True):
            torch.testing.assert_close(out, alone(case, rank), rtol=1e-5, atol=1e-5)


@pytest.mark.ranks(2)
def test_exact_exchange_refuses_a_recording():
    case = Case(loads=(2, 1), num_tokens=3)
    for rank, (messages, out) in enumerate(run_ranks(2, refuse_recording)):
        assert [kind for kind, _ in messages] == ["RecordingError", "RecordingError"]
        for _, message in messages:
            assert "host sync" in message
            assert "all-to-all and allgather-reducescatter" in message
        assert torch.equal(out, alone(case, rank))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", CAPTURABLE)
def test_buffers_refuse_what_they_cannot_hold(backend):
    for messages in run_ranks(2, refuse_sizes, backend):
        assert [kind for kind, _ in messages] == ["ConfigError"] * 3
        assert "5 tokens of microbatch 0 do not fit buffers for 4" in messages[0][1]
        assert "4 tokens of microbatch 1 do not fit buffers for 3" in messages[1][1]
        assert "not for index 2" in messages[2][1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_rank_exchanges_nothing(backend):
    made = make_dispatcher(
        ParallelConfig(all2all_backend=backend),
        None,
        tiny_model(),
        dtype=torch.float32,
        max_tokens=8,
        num_microbatches=2,
        loopback=True,
    )
    assert isinstance(made, LocalDispatcher)
    assert made.dropped_rows() == 0
