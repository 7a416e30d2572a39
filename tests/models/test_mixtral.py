import json

import pytest
import torch
from safetensors import safe_open

from cgprof.accuracy.parity import ParityChecker
from cgprof.attention.reference import ReferenceAttention
from cgprof.config.model_card import load_model_card
from cgprof.errors import ConfigError
from cgprof.models.zoo import weight_bytes
from cgprof.shapes import CapturePolicy
from tests.support.builders import captured_engine, tiny_model, tiny_run
from tests.support.models import make_context, make_model, run_hidden

PROMPT = [5, 9, 2, 2, 77, 30, 1]
MIXTRAL = tiny_model().model_copy(update={"family": "mixtral", "qk_norm": False, "ffn_size": 0})


@pytest.fixture
def published(tmp_path):
    """A random checkpoint as transformers publishes it, and the model that wrote it."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=5,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = MixtralForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(tmp_path)
    return tmp_path, model


def stored_names(folder):
    with safe_open(folder / "model.safetensors", framework="pt") as stored:
        return set(stored.keys())


def test_checkpoint_of_transformers_gives_its_logits(published):
    folder, theirs = published
    assert "model.layers.1.block_sparse_moe.experts.4.w2.weight" in stored_names(folder)
    card = load_model_card(str(folder))
    assert (card.family, card.num_experts, card.expert_ffn_size) == ("mixtral", 5, 96)
    ours = make_model(card, ReferenceAttention())
    scores = ours.logits(run_hidden(ours, make_context([PROMPT], [0])))
    expected = theirs(torch.tensor([PROMPT])).logits[0]
    assert expected.std() > 0.1
    torch.testing.assert_close(scores, expected, rtol=0, atol=2e-5)


def test_weight_names_are_those_of_the_checkpoint(published):
    folder, _ = published
    model = make_model(load_model_card(str(folder)), ReferenceAttention())
    assert {name for name, _ in model.named_weights()} == stored_names(folder)


def test_lost_expert_is_named_as_the_checkpoint_spells_it(published):
    folder, theirs = published
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_local_experts": 6}))
    assert theirs.config.num_local_experts == 5
    with pytest.raises(ConfigError, match=r"block_sparse_moe\.experts\.5\.w1\.weight"):
        make_model(load_model_card(str(folder)), ReferenceAttention())


def test_published_parameter_count():
    card = load_model_card("mixtral-8x7b")
    assert weight_bytes(card, torch.bfloat16) == 2 * 46_702_792_704


def test_full_graphs_and_twins_are_captured_and_equal_eager():
    run = tiny_run(CapturePolicy.FULL, sizes=(2, 8, 32), dbo=True)
    with captured_engine(run, MIXTRAL) as engine:
        keys = engine.graphs.keys
        assert any(key.is_twin for key in keys)
        assert any(not key.is_twin for key in keys)
        checker = ParityChecker(engine)
        for key in keys:
            legs = checker.check(key)
            assert legs
            assert all(leg.tokens_different == 0 for leg in legs), (key, legs)
