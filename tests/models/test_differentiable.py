import pytest
import torch

from cgprof.attention.reference import ReferenceAttention
from cgprof.models.checkpoint import load_state
from cgprof.models.differentiable import DifferentiableDecoder, initial_weights
from tests.support.builders import tiny_model
from tests.support.models import make_context, make_model

CPU = torch.device("cpu")
TOKENS = [[5, 17, 90, 3, 3, 41, 8], [64, 64, 2, 11, 100, 7, 30]]


@pytest.fixture(autouse=True)
def _gradients(_inference_mode):
    with torch.inference_mode(False):
        yield


def weights_and_decoder(config, seed=5):
    return initial_weights(config, seed, CPU), DifferentiableDecoder(config, CPU)


def test_scores_equal_those_of_the_engine_decoder():
    config = tiny_model()
    weights, decoder = weights_and_decoder(config)
    scores, _ = decoder.forward(weights, torch.tensor(TOKENS))
    with torch.inference_mode():
        model = make_model(config, ReferenceAttention())
        load_state(model, weights)
        hidden = torch.empty(14, config.hidden_size)
        model.forward(make_context(TOKENS, [0, 0]), hidden)
        expected = model.logits(hidden)
    torch.testing.assert_close(scores.flatten(0, 1), expected, rtol=1e-4, atol=1e-5)


def test_tied_embeddings_score_with_the_embedding():
    config = tiny_model(tied_embeddings=True)
    weights, decoder = weights_and_decoder(config)
    assert "lm_head.weight" not in weights
    untied = DifferentiableDecoder(tiny_model(), CPU)
    copied = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    tokens = torch.tensor(TOKENS)
    assert torch.equal(decoder.forward(weights, tokens)[0], untied.forward(copied, tokens)[0])


def test_later_tokens_do_not_change_earlier_scores():
    weights, decoder = weights_and_decoder(tiny_model())
    tokens = torch.tensor(TOKENS)
    whole, _ = decoder.forward(weights, tokens)
    torch.testing.assert_close(decoder.forward(weights, tokens[:, :4])[0], whole[:, :4])


def test_every_weight_takes_a_gradient():
    weights, decoder = weights_and_decoder(tiny_model())
    tokens = torch.arange(120).view(4, 30)
    scores, imbalance = decoder.forward(weights, tokens)
    torch.autograd.backward(scores.square().mean() + imbalance)
    still = [name for name, tensor in weights.items() if not (tensor.grad != 0).any()]
    assert still == []


def test_imbalance_is_one_when_even_and_grows_when_two_experts_take_all():
    config = tiny_model()
    weights, decoder = weights_and_decoder(config)
    tokens = torch.arange(120).view(4, 30)
    gates = [name for name in weights if name.endswith("mlp.gate.weight")]
    with torch.no_grad():
        for name in gates:
            weights[name].mul_(1e-3)
        _, even = decoder.forward(weights, tokens)
        for name in gates:
            weights[name].zero_()[0] = 100.0
            weights[name][1] = -100.0
        _, uneven = decoder.forward(weights, tokens)
    assert abs(even.item() - 1) < 0.05
    assert uneven.item() > 1.5
