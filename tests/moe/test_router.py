import pytest
import torch

from cgprof.moe.router import route
from tests.support.triton_cpu import compile_for_hopper, run_interpreted


def distinct_logits(num_tokens: int, num_experts: int, seed: int = 0) -> torch.Tensor:
    """No two scores of a token are equal, also after rounding to bf16."""
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.stack(
        [torch.randperm(num_experts, generator=generator) for _ in range(num_tokens)]
    )
    return (ranks - num_experts / 2) / 8


@pytest.mark.parametrize("norm_topk", [True, False])
def test_route_equals_transformers(norm_topk):
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    config = Qwen3MoeConfig(
        num_experts=16, num_experts_per_tok=4, hidden_size=8, norm_topk_prob=norm_topk
    )
    router = Qwen3MoeTopKRouter(config)
    router.weight.copy_(torch.randn(16, 8))
    x = torch.randn(9, 8)
    logits, expected, expected_ids = router(x)
    none = torch.zeros(9, dtype=torch.bool)
    weights, ids = route(logits, none, top_k=4, norm_topk=norm_topk)
    assert torch.equal(weights, expected)
    assert torch.equal(ids, expected_ids.int())
    assert weights.dtype is torch.float32
    assert ids.dtype is torch.int32


def test_route_with_weights_that_sum_to_one_equals_transformers_mixtral():
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    config = MixtralConfig(num_local_experts=8, num_experts_per_tok=2, hidden_size=16)
    router = MixtralTopKRouter(config)
    router.weight.copy_(torch.randn(8, 16))
    logits, expected, expected_ids = router(torch.randn(9, 16))
    none = torch.zeros(9, dtype=torch.bool)
    weights, ids = route(logits, none, top_k=2, norm_topk=True)
    assert torch.equal(weights, expected)
    assert torch.equal(ids, expected_ids.int())
    # The paper's wording: a softmax over the chosen scores alone.
    chosen = torch.softmax(logits.gather(1, expected_ids), dim=-1)
    torch.testing.assert_close(weights, chosen, rtol=1e-6, atol=1e-7)


def test_route_gives_padding_no_expert():
    padding = torch.tensor([False, True, False])
    _, ids = route(distinct_logits(3, 8), padding, top_k=2, norm_topk=True)
    assert (ids[1] == -1).all()
    assert (ids[[0, 2]] >= 0).all()


def check_fused(num_tokens, num_experts, top_k, norm_topk, dtype, device):
    from cgprof.moe.router import route_plain
    from cgprof.moe.router_triton import route_fused

    logits = distinct_logits(num_tokens, num_experts).to(dtype)
    padding = torch.arange(num_tokens) % 3 == 1
    expected, expected_ids = route_plain(logits, padding, top_k, norm_topk)
    weights, ids = route_fused(logits.to(device), padding.to(device), top_k, norm_topk)
    assert torch.equal(ids.cpu(), expected_ids)
    torch.testing.assert_close(weights.cpu(), expected, rtol=1e-5, atol=1e-7)


def check_fused_nan(device):
    from cgprof.moe.router_triton import route_fused

    logits = torch.full((2, 12), torch.nan)
    logits[1] = torch.arange(12.0)
    padding = torch.zeros(2, dtype=torch.bool)
    _, ids = route_fused(logits.to(device), padding.to(device), 3, True)
    assert ((ids >= 0) & (ids < 12)).all()
    assert ids[1].tolist() == [11, 10, 9]


SIZES = [(1, 8, 2, True), (5, 12, 3, False), (9, 128, 8, True)]


@pytest.mark.parametrize("size", SIZES)
def test_fused_router_equals_plain_when_interpreted(size):
    run_interpreted(check_fused, *size, torch.float32, "cpu")


def test_fused_router_chooses_real_experts_for_nan_when_interpreted():
    run_interpreted(check_fused_nan, "cpu")


def test_fused_router_compiles_for_hopper():
    from cgprof.moe.router_triton import _route_kernel

    compile_for_hopper(
        _route_kernel,
        {
            "logits": "*bf16",
            "is_padding": "*i1",
            "weights": "*fp32",
            "expert_ids": "*i32",
        },
        {
            "NUM_EXPERTS": 128,
            "TOP_K": 8,
            "NORM_TOPK": True,
            "BLOCK_E": 128,
            "BLOCK_K": 8,
        },
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [*SIZES, (257, 128, 8, True), (33, 60, 4, False)])
def test_fused_router_equals_plain_on_gpu(size, dtype):
    check_fused(*size, dtype, "cuda")


@pytest.mark.gpu
def test_fused_router_chooses_real_experts_for_nan_on_gpu():
    check_fused_nan("cuda")
