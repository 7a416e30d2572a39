import pytest
import torch

from cgprof.attention.reference import ReferenceAttention
from cgprof.errors import ConfigError
from cgprof.models.checkpoint import load_state, seed_weights, tensor_seed
from tests.support.builders import tiny_model
from tests.support.models import make_model


def weights_of(card, seed=3):
    model = make_model(card, ReferenceAttention())
    for _, tensor in model.named_weights():
        tensor.fill_(torch.nan)
    seed_weights(model, seed)
    return dict(model.named_weights())


def test_seeded_weights_depend_on_the_name_alone():
    small = weights_of(tiny_model())
    deeper = weights_of(tiny_model(num_layers=3, num_experts=11))
    shared = [name for name in small if name in deeper and small[name].shape == deeper[name].shape]
    assert "model.layers.1.mlp.experts.5.gate_proj.weight" in shared
    assert all(torch.equal(small[name], deeper[name]) for name in shared)


def test_seeded_weights_differ_between_names_and_seeds():
    weights = weights_of(tiny_model())
    assert all(tensor.isfinite().all() for tensor in weights.values())
    firsts = {tuple(tensor.flatten()[:4].tolist()) for tensor in weights.values()}
    assert len(firsts) == len(weights)
    other = weights_of(tiny_model(), seed=4)
    assert not any(torch.equal(weights[name], other[name]) for name in weights)


def test_tensor_seed_is_fixed_for_ever():
    assert tensor_seed(0, "model.norm.weight") == 0x406F348A_B902CBC4


def test_seeded_activations_stay_near_one():
    weights = weights_of(tiny_model(hidden_size=64))
    assert 0.9 < weights["model.embed_tokens.weight"].std() < 1.1
    assert 0.9 < weights["model.layers.0.self_attn.q_proj.weight"].std() * 8 < 1.1
    assert 1.8 < weights["model.layers.0.mlp.gate.weight"].std() * 8 < 2.2
    norm = weights["model.layers.1.post_attention_layernorm.weight"]
    assert abs(norm.mean() - 1) < 0.1
    assert 0.05 < norm.std() < 0.15


def test_load_state_names_what_is_missing_unknown_or_misshapen():
    model = make_model(tiny_model(), ReferenceAttention())
    before = {name: tensor.clone() for name, tensor in model.named_weights()}
    zeros = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    missing = {name: tensor for name, tensor in zeros.items() if ".q_proj" not in name}
    with pytest.raises(ConfigError, match=r"lacks model\.layers\.0\.self_attn\.q_proj\.weight"):
        load_state(model, missing)
    with pytest.raises(ConfigError, match=r"unknown model\.norm\.bias"):
        load_state(model, zeros | {"model.norm.bias": torch.zeros(32)})
    with pytest.raises(ConfigError, match=r"model\.norm\.weight has shape \(31,\)"):
        load_state(model, zeros | {"model.norm.weight": torch.zeros(31)})
    assert all(torch.equal(before[name], tensor) for name, tensor in model.named_weights())
    load_state(model, zeros)
    assert not any(tensor.any() for _, tensor in model.named_weights())


def test_tied_models_ignore_a_second_copy_of_the_embedding():
    model = make_model(tiny_model(tied_embeddings=True), ReferenceAttention())
    state = {name: torch.ones_like(tensor) for name, tensor in model.named_weights()}
    assert "lm_head.weight" not in state
    load_state(model, state | {"lm_head.weight": torch.zeros(128, 32)})
    assert all((tensor == 1).all() for _, tensor in model.named_weights())
