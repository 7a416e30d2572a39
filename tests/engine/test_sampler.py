import numpy as np
import pytest
import torch
from scipy import stats

from cgprof.engine.sampler import greedy, sample, uniform_draws

CPU_AND_GPU = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def draws_of(seed, count, start=0):
    return uniform_draws(np.full(count, seed, np.int64), np.arange(start, start + count))


def test_same_seed_repeats_and_another_differs():
    assert (draws_of(1, 64) == draws_of(1, 64)).all()
    assert (draws_of(1, 64) != draws_of(2, 64)).mean() > 0.9


def test_draw_depends_on_seed_and_position_only():
    seeds = np.array([5, -3, 5, 0, 2**62], np.int64)
    positions = np.array([9, 1, 10, 0, 4095], np.int32)
    together = uniform_draws(seeds, positions)
    alone = [uniform_draws(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(5)]
    assert together.tolist() == alone
    assert len(set(alone)) == 5


@pytest.mark.parametrize("seed", [0, 1, 2, -1, 123456789])
def test_draws_of_one_seed_are_uniform(seed):
    draws = draws_of(seed, 20_000)
    assert draws.dtype == np.float32
    assert draws.min() >= 0
    assert draws.max() < 1
    counts, _ = np.histogram(draws, bins=50, range=(0, 1))
    assert stats.chisquare(counts).pvalue > 1e-4


def test_draws_of_many_seeds_at_one_position_are_uniform():
    draws = uniform_draws(np.arange(20_000, dtype=np.int64), np.full(20_000, 7))
    counts, _ = np.histogram(draws, bins=50, range=(0, 1))
    assert stats.chisquare(counts).pvalue > 1e-4


def test_neighbouring_positions_are_not_correlated():
    draws = draws_of(3, 20_000)
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03


@pytest.mark.parametrize("device", CPU_AND_GPU)
def test_greedy_takes_the_lowest_of_equal_logits(device):
    logits = torch.zeros(3, 4096, device=device)
    logits[1, [70, 900]] = 2.0
    logits[2, 4095] = 1.0
    zeros = torch.zeros(3, device=device)
    for tokens in (greedy(logits), sample(logits, zeros, zeros)):
        assert tokens.tolist() == [0, 70, 4095]
        assert tokens.dtype == torch.int64


@pytest.mark.parametrize("device", CPU_AND_GPU)
def test_random_tokens_follow_the_softmax(device):
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, 0.5], device=device)
    count, temperature = 20_000, 0.7
    tokens = sample(
        logits.expand(count, 5),
        torch.full((count,), temperature, device=device),
        torch.from_numpy(draws_of(11, count)).to(device),
    )
    expected = (logits / temperature).softmax(0).cpu().double().numpy()
    observed = np.bincount(tokens.cpu().numpy(), minlength=5)
    assert stats.chisquare(observed, expected / expected.sum() * count).pvalue > 1e-4


def test_token_is_the_inverse_cdf_at_the_draw():
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log().expand(4, 3)
    draws = torch.tensor([0.0, 0.4999, 0.5001, 0.7501])
    assert sample(logits, torch.ones(4), draws).tolist() == [0, 0, 1, 2]


def test_token_of_no_weight_is_never_drawn():
    logits = torch.full((2, 50_000), -200.0)
    logits[:, 10:30_000] = 0.0
    draws = torch.tensor([0.0, 1 - 2.0**-24])
    first, last = sample(logits, torch.ones(2), draws).tolist()
    assert first == 10
    assert last == 29_999


def test_rows_of_both_kinds_do_not_change_each_other():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 300, generator=generator)
    temperature = torch.tensor([0.0, 1.0, 0.0, 0.3, 5.0, 1e-30])
    draws = torch.from_numpy(draws_of(4, 6))
    together = sample(logits, temperature, draws)
    for row in range(6):
        part = slice(row, row + 1)
        alone = sample(logits[part], temperature[part], draws[part])
        assert alone.item() == together[row].item()
    greedy = logits.argmax(-1)
    assert together[[0, 2, 5]].tolist() == greedy[[0, 2, 5]].tolist()


def test_sequence_of_one_seed_varies_over_positions():
    logits = torch.zeros(64, 1000)
    tokens = [
        sample(logits, torch.ones(64), torch.from_numpy(draws_of(seed, 64))).tolist()
        for seed in (1, 1, 2)
    ]
    assert len(set(tokens[0])) > 30
    assert tokens[0] == tokens[1]
    assert tokens[0] != tokens[2]
