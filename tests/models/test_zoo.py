import pytest
import torch

from cgprof.attention.reference import ReferenceAttention
from cgprof.config.schema import ModelConfig
from cgprof.models.zoo import weight_bytes
from tests.support.builders import tiny_model
from tests.support.models import make_model

QWEN3_30B = ModelConfig(
    name="qwen3-30b-a3b",
    family="qwen3_moe",
    num_layers=48,
    hidden_size=2048,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    ffn_size=6144,
    vocab_size=151936,
    num_experts=128,
    experts_per_token=8,
    expert_ffn_size=768,
    max_positions=64,
)
QWEN3_06B = ModelConfig(
    name="qwen3-0.6b",
    family="qwen3",
    num_layers=28,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=3072,
    vocab_size=151936,
    tied_embeddings=True,
    max_positions=64,
)


@pytest.mark.parametrize(
    ("card", "num_parameters"), [(QWEN3_30B, 30_532_122_624), (QWEN3_06B, 596_049_920)]
)
def test_weight_bytes_match_the_published_parameter_counts(card, num_parameters):
    assert weight_bytes(card, torch.bfloat16) == 2 * num_parameters
    assert weight_bytes(card, torch.float32) == 4 * num_parameters


@pytest.mark.parametrize("num_experts", [0, 8])
def test_weight_bytes_are_what_a_model_holds(num_experts):
    card = tiny_model(num_experts=num_experts)
    model = make_model(card, ReferenceAttention())
    storages = {tensor.untyped_storage().data_ptr(): tensor for _, tensor in model.named_weights()}
    held = sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
    assert weight_bytes(card, torch.float32) == held == model.num_weight_bytes
