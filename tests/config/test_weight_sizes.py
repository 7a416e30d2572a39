import pytest
import torch

from cgprof.config.bundled import bundled_names
from cgprof.config.card_fields import CardFields
from cgprof.config.inspect import inspect_card
from cgprof.config.model_card import load_model_card
from cgprof.config.quantisation import read_quantisation
from cgprof.config.weight_sizes import ExpertShape, LatentShape, WeightShape, weight_parts
from cgprof.models.zoo import weight_bytes
from tests.support.cards import DENSE, MOE, card, write_card

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
V2_LITE = WeightShape(
    num_layers=27,
    attention_layers=tuple(range(27)),
    hidden_size=2048,
    vocab_size=102400,
    num_heads=16,
    num_kv_heads=16,
    head_dim=0,
    ffn_size=10944,
    experts=ExpertShape(
        layers=tuple(range(1, 27)), num_experts=64, ffn_size=1408, shared_ffn_size=2816
    ),
    latent=LatentShape(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128),
)
V3 = WeightShape(
    num_layers=61,
    attention_layers=tuple(range(61)),
    hidden_size=7168,
    vocab_size=129280,
    num_heads=128,
    num_kv_heads=128,
    head_dim=0,
    ffn_size=18432,
    experts=ExpertShape(
        layers=tuple(range(3, 61)), num_experts=256, ffn_size=2048, shared_ffn_size=2048
    ),
    latent=LatentShape(
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        q_lora_rank=1536,
        qk_nope_head_dim=128,
        v_head_dim=128,
    ),
)


def parameters(parts) -> int:
    return sum(part.num_parameters for part in parts)


def by_name(parts):
    return {part.name: part for part in parts}


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("name", bundled_names("models"))
def test_families_that_run_are_right_to_the_byte(name, dtype):
    found = inspect_card(name, dtype=dtype)
    assert found.weight_bytes == weight_bytes(load_model_card(name), TYPES[dtype])


@pytest.mark.parametrize(
    "content",
    [
        card(DENSE, model_type="llama", tie_word_embeddings=True),
        card(MOE, model_type="llama_moe"),
        card(DENSE, model_type="mixtral", num_local_experts=4, num_experts_per_tok=2),
    ],
    ids=["llama", "llama_moe", "mixtral"],
)
def test_other_families_that_run_are_right_to_the_byte(tmp_path, content):
    path = write_card(tmp_path, content)
    assert inspect_card(path).weight_bytes == weight_bytes(load_model_card(path), torch.float32)


def test_latent_attention_and_shared_experts_give_the_published_counts():
    assert parameters(weight_parts(V2_LITE, 2)) == 15_706_484_224
    # Less the 256 biases of each of 58 routers.
    assert parameters(weight_parts(V3, 2)) == 671_026_419_200 - 58 * 256


def test_quantised_parts_leave_the_ignore_list_embeddings_head_norms_and_routers():
    block = {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.self_attn"]}
    fp8 = read_quantisation(CardFields("card", {"quantization_config": block}))
    plain, mixed = by_name(weight_parts(V2_LITE, 2)), by_name(weight_parts(V2_LITE, 2, fp8))
    for name in ("embeddings", "output head", "norms", "routers"):
        assert mixed[name] == plain[name]
        assert mixed[name].num_quantised == 0
    attention = plain["attention"].num_parameters
    assert mixed["attention"].num_quantised == attention * 26 // 27
    experts = mixed["experts"]
    assert experts.num_quantised == experts.num_parameters
    # One byte an element, four for the scale of each matrix.
    assert experts.num_bytes == experts.num_parameters + 4 * 26 * 64 * 3


def test_mxfp4_covers_experts_alone():
    mxfp4 = read_quantisation(
        CardFields("card", {"quantization_config": {"quant_method": "mxfp4"}})
    )
    parts = by_name(weight_parts(V2_LITE, 2, mxfp4))
    assert {name for name, part in parts.items() if part.num_quantised} == {"experts"}
    assert parts["experts"].num_bytes == parts["experts"].num_parameters * 17 // 32


def test_part_whose_size_is_open_is_not_guessed():
    shape = WeightShape(
        num_layers=2,
        attention_layers=(0, 1),
        hidden_size=64,
        vocab_size=0,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        ffn_size=0,
    )
    parts = by_name(weight_parts(shape, 2))
    assert parts["attention"].num_bytes == 2 * 2 * 4 * 64 * 64
    assert parts["embeddings"].num_bytes is None
    assert parts["dense feed-forward"].num_parameters is None
    latent = WeightShape(
        num_layers=1,
        attention_layers=(0,),
        hidden_size=64,
        vocab_size=8,
        num_heads=4,
        num_kv_heads=4,
        head_dim=0,
        ffn_size=8,
        latent=LatentShape(kv_lora_rank=32, qk_rope_head_dim=8),
    )
    assert by_name(weight_parts(latent, 2))["attention"].num_bytes is None
