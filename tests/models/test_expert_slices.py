import pytest
import torch

from cgprof.attention.reference import ReferenceAttention
from cgprof.config.model_card import load_model_card
from cgprof.errors import ConfigError
from cgprof.models.expert_slices import slice_experts, sliced_card
from tests.support.cards import write_card
from tests.support.checkpoints import LLAMA, save_model, save_state
from tests.support.models import make_context, make_model, run_hidden

TOKENS = [[5, 9, 2, 2, 77, 30, 1], [3], [100 - t for t in range(19)]]


def logits(folder, pad_tokens=3):
    model = make_model(load_model_card(str(folder)), ReferenceAttention())
    context = make_context(TOKENS, [0, 0, 0], pad_tokens=pad_tokens)
    return model, model.logits(run_hidden(model, context)[:-pad_tokens])


def write_sliced(folder, state, num_experts):
    folder.mkdir(exist_ok=True)
    write_card(folder, sliced_card(LLAMA, num_experts))
    save_state(folder, dict(slice_experts(state.items(), num_experts)))


@pytest.mark.parametrize("num_experts", [2, 4, 16])
def test_slices_add_up_to_the_dense_layer(tmp_path, num_experts):
    state = save_model(tmp_path, LLAMA)
    _, dense = logits(tmp_path)
    write_sliced(tmp_path / "sliced", state, num_experts)
    model, sliced = logits(tmp_path / "sliced")
    assert model.config.num_experts == model.config.experts_per_token == num_experts
    assert model.config.expert_ffn_size == 128 // num_experts
    torch.testing.assert_close(sliced, dense, rtol=1e-5, atol=1e-5)


def test_order_of_the_slices_does_not_matter_and_a_wrong_one_does(tmp_path):
    state = save_model(tmp_path, LLAMA)
    _, dense = logits(tmp_path)
    sliced = dict(slice_experts(state.items(), 4))
    write_card(tmp_path, sliced_card(LLAMA, 4))
    order = {
        ".experts.0.": ".experts.2.",
        ".experts.2.": ".experts.3.",
        ".experts.3.": ".experts.0.",
    }

    def renamed(name, only=""):
        for old, new in order.items():
            if old in name and only in name:
                return name.replace(old, new)
        return name

    save_state(tmp_path, {renamed(name): tensor for name, tensor in sliced.items()})
    _, permuted = logits(tmp_path)
    torch.testing.assert_close(permuted, dense, rtol=1e-5, atol=1e-5)
    save_state(tmp_path, {renamed(name, "down"): tensor for name, tensor in sliced.items()})
    _, mixed_up = logits(tmp_path)
    assert (mixed_up - dense).abs().max() > 0.1


def test_tokens_order_their_experts_differently_and_weigh_them_alike(tmp_path):
    write_sliced(tmp_path, save_model(tmp_path, LLAMA), 8)
    model, _ = logits(tmp_path)
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    context = make_context([[0] * 38], [0], pad_tokens=2)
    weights, ids = model._layers[0].moe.route(x, context)
    assert (weights == 1).all()
    assert (ids[-2:] == -1).all()
    assert {tuple(sorted(row)) for row in ids[:-2].tolist()} == {tuple(range(8))}
    assert len({tuple(row) for row in ids[:-2].tolist()}) > 20


@pytest.mark.parametrize(("num_experts", "hint"), [(3, "2, 4, 8, 16"), (32, "2, 4, 8, 16")])
def test_slices_that_do_not_fit_are_refused_with_those_that_do(num_experts, hint):
    with pytest.raises(ConfigError, match=hint):
        sliced_card(LLAMA, num_experts)
