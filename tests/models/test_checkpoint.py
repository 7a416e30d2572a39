import pytest
import torch

from cgprof.attention.reference import ReferenceAttention
from cgprof.config.model_card import load_model_card
from cgprof.errors import ConfigError
from cgprof.models.checkpoint import load_state, seed_weights, tensor_seed
from tests.support.builders import tiny_model
from tests.support.cards import MOE, card
from tests.support.checkpoints import LLAMA, save_model, save_state
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


def loaded(folder, **settings):
    """The model of a directory, made as an engine makes it."""
    model = make_model(load_model_card(str(folder)), ReferenceAttention(), **settings)
    return dict(model.named_weights())


def refusal(folder) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("content", [LLAMA, MOE], ids=["llama", "moe"])
def test_directory_is_loaded_and_nothing_is_seeded(tmp_path, content, num_shards):
    state = save_model(tmp_path, content, num_shards=num_shards)
    doubled = {name: 2 * tensor for name, tensor in state.items()}
    save_state(tmp_path, doubled, num_shards=num_shards)
    weights = loaded(tmp_path)
    assert weights.keys() == state.keys()
    assert all(torch.equal(weights[name], doubled[name]) for name in state)


def test_directory_is_converted_to_the_dtype_of_the_model(tmp_path):
    state = save_model(tmp_path, LLAMA)
    weights = loaded(tmp_path, dtype=torch.bfloat16)
    assert all(torch.equal(weights[name], state[name].bfloat16()) for name in state)
    save_state(tmp_path, {name: tensor.bfloat16() for name, tensor in state.items()})
    weights = loaded(tmp_path)
    assert all(torch.equal(weights[name], state[name].bfloat16().float()) for name in state)


def test_what_a_directory_lacks_or_has_too_much_is_named_and_counted(tmp_path):
    state = save_model(tmp_path, MOE)
    missing = {name: tensor for name, tensor in state.items() if ".experts.7." not in name}
    save_state(tmp_path, missing)
    message = refusal(tmp_path)
    assert "lacks model.layers.0.mlp.experts.7.down_proj.weight, " in message
    assert "and 3 more (6 tensors)" in message
    save_state(tmp_path, state | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    assert "unknown model.layers.0.self_attn.q_proj.bias (1 tensor)" in refusal(tmp_path)
    save_state(tmp_path, state | {"model.norm.weight": torch.zeros(63)})
    message = refusal(tmp_path)
    assert "model.norm.weight has shape (63,), the model card needs (64,)" in message


def test_rotary_buffers_of_old_checkpoints_are_no_surplus(tmp_path):
    state = save_model(tmp_path, LLAMA)
    inverse = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    save_state(tmp_path, state | inverse)
    assert loaded(tmp_path).keys() == state.keys()


def test_dtype_that_is_not_converted_is_refused(tmp_path):
    state = save_model(tmp_path, LLAMA)
    save_state(tmp_path, state | {"model.norm.weight": torch.ones(64, dtype=torch.int32)})
    assert "model.norm.weight is I32" in refusal(tmp_path)


def test_file_whose_ranges_overlap_is_refused(tmp_path):
    save_model(tmp_path, LLAMA)
    file = tmp_path / "model.safetensors"
    damaged = file.read_bytes().replace(b'"data_offsets":[0,', b'"data_offsets":[4,', 1)
    file.write_bytes(damaged)
    assert "model.safetensors: is damaged" in refusal(tmp_path)


def test_tied_directory_needs_no_head(tmp_path):
    state = save_model(tmp_path, card(LLAMA, tie_word_embeddings=True))
    assert "lm_head.weight" not in state
    assert loaded(tmp_path).keys() == state.keys()


@pytest.mark.gpu
def test_directory_is_loaded_onto_the_gpu(tmp_path):
    state = save_model(tmp_path, MOE, num_shards=2)
    weights = loaded(tmp_path, device="cuda", dtype=torch.bfloat16)
    assert all(torch.equal(weights[name].cpu(), state[name].bfloat16()) for name in state)
