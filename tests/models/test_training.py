import pytest
import torch

from cgprof.models.differentiable import initial_weights
from cgprof.models.training import IGNORED, fit
from tests.support.builders import tiny_model

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _gradients(_inference_mode):
    with torch.inference_mode(False):
        yield


def copying_batches(count, *, seed=0):
    """Random tokens; the target of each is the token itself, and the first is not learnt."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        tokens = torch.randint(0, 16, (16, 6), generator=generator)
        targets = tokens.clone()
        targets[:, 0] = IGNORED
        yield tokens, targets


def fitted(config, *, seed=0, batches=None, steps=60):
    texts: list[str] = []
    weights, losses = fit(
        config,
        copying_batches(steps) if batches is None else batches,
        steps=steps,
        learning_rate=1e-2,
        seed=seed,
        device=CPU,
        progress=texts.append,
    )
    return weights, losses, texts


def test_fitting_lowers_the_loss_and_reports_it():
    _, before, _ = fitted(tiny_model(), steps=1)
    _, after, texts = fitted(tiny_model())
    assert after["answers"] < before["answers"] / 2
    assert texts[-1].startswith("step 60/60 answers ")


def test_fitting_repeats_with_the_seed():
    config = tiny_model()
    first, _, _ = fitted(config, steps=5)
    again, _, _ = fitted(config, steps=5)
    other, _, _ = fitted(config, seed=1, steps=5)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_without_batches_the_seeded_weights_come_back():
    config = tiny_model()
    weights, losses, _ = fitted(config, batches=[], steps=1)
    initial = initial_weights(config, 0, CPU)
    assert losses == {}
    assert all(torch.equal(weights[name], initial[name]) for name in initial)
