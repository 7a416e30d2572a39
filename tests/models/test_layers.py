import pytest
import torch

from cgprof.errors import UnsupportedError
from cgprof.models.layers import QKNormRope, make_rope_table, rms_norm_plain, rotate_plain
from tests.support.builders import tiny_model
from tests.support.triton_cpu import compile_for_hopper, run_interpreted


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_rms_norm_equals_transformers_bitwise():
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    for dtype in (torch.float32, torch.bfloat16):
        norm = Qwen3RMSNorm(24, eps=1e-6).to(dtype)
        norm.weight.copy_(1 + normal(24) / 4)
        x = normal(5, 24, seed=1).to(dtype)
        assert torch.equal(rms_norm_plain(x, norm.weight, 1e-6), norm(x))


def test_rotation_equals_transformers():
    from transformers.models.qwen3.modeling_qwen3 import (
        Qwen3Config,
        Qwen3RotaryEmbedding,
        apply_rotary_pos_emb,
    )

    card = tiny_model(head_dim=16)
    config = Qwen3Config(head_dim=16, num_attention_heads=3, hidden_size=48)
    config.rope_parameters = {"rope_type": "default", "rope_theta": card.rope.theta}
    positions = torch.tensor([0, 1, 17, 300, 4351])
    heads = normal(5, 3, 16)
    cos, sin = Qwen3RotaryEmbedding(config)(heads[None], positions[None])
    expected, _ = apply_rotary_pos_emb(heads[None], heads[None], cos, sin, unsqueeze_dim=2)
    angles = make_rope_table(card, torch.device("cpu"))[positions]
    torch.testing.assert_close(rotate_plain(heads, angles), expected[0], rtol=0, atol=1e-6)


def test_llama3_scaling_equals_transformers():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    card = tiny_model(
        head_dim=64,
        rope={"kind": "llama3", "theta": 5e5, **scaling, "original_max_positions": 512},
    )
    config = LlamaConfig(head_dim=64, num_attention_heads=1, hidden_size=64)
    config.rope_parameters = {"rope_type": "llama3", "rope_theta": 5e5, **scaling}
    config.rope_parameters["original_max_position_embeddings"] = 512
    positions = torch.tensor([0, 1, 17, 300, 4351])
    cos, sin = LlamaRotaryEmbedding(config)(normal(1), positions[None])
    angles = make_rope_table(card, torch.device("cpu"))[positions]
    expected = torch.cat((cos[0, :, :32], sin[0, :, :32]), dim=1)
    torch.testing.assert_close(angles, expected, rtol=0, atol=1e-6)
    unscaled = make_rope_table(tiny_model(head_dim=64, rope={"theta": 5e5}), torch.device("cpu"))
    differ = (angles != unscaled[positions]).any(dim=0)[:32]
    assert not differ[0]
    assert differ[-1]


def test_rope_table_refuses_scaling():
    card = tiny_model(rope={"kind": "yarn", "factor": 4.0})
    with pytest.raises(UnsupportedError, match="yarn"):
        make_rope_table(card, torch.device("cpu"))


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    step = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    return {"rtol": step, "atol": step}


def check_norm(num_tokens, size, dtype, device):
    from cgprof.models.layers_triton import add_rms_norm_fused

    residual, x = normal(num_tokens, size).to(dtype), normal(num_tokens, size, seed=1).to(dtype)
    weight = (1 + normal(size) / 4).to(dtype)
    total = residual + x
    here = residual.to(device)
    out = torch.empty_like(here)
    add_rms_norm_fused(here, None, weight.to(device), 1e-6, out)
    assert torch.equal(here.cpu(), residual)
    torch.testing.assert_close(
        out.cpu(), rms_norm_plain(residual, weight, 1e-6), **tolerance(dtype)
    )
    add_rms_norm_fused(here, x.to(device), weight.to(device), 1e-6, out)
    torch.testing.assert_close(here.cpu(), total, **tolerance(dtype))
    torch.testing.assert_close(out.cpu(), rms_norm_plain(total, weight, 1e-6), **tolerance(dtype))


def check_heads(num_tokens, head_dim, qk_norm, dtype, device):
    from cgprof.models.heads_triton import norm_rotate_store

    card = tiny_model(head_dim=head_dim, num_heads=6, num_kv_heads=3, qk_norm=qk_norm)
    part = QKNormRope(card, device=torch.device("cpu"), dtype=dtype)
    weights = None
    if qk_norm:
        weights = (1 + normal(2, head_dim) / 4).to(dtype)
        for (_, target), row in zip(part.named_weights("x"), weights, strict=True):
            target.copy_(row)
    table = make_rope_table(card, torch.device("cpu"))
    qkv = normal(num_tokens, 12 * head_dim).to(dtype)
    positions = torch.arange(num_tokens) * 37 % 4000
    # Slots in no order, the first of every five none; other slots must keep their bits.
    slots = (torch.arange(num_tokens) * 7 + 3) % (16 * (num_tokens + 1))
    slots[::5] = -1
    expected_cache = normal(num_tokens + 1, 2, 16, 3, head_dim).to(dtype)
    cache = expected_cache.clone().to(device)
    expected = part.forward(qkv, positions, table, expected_cache, slots)
    heads = qkv.clone().to(device).view(num_tokens, 12, head_dim)
    on_device = None if weights is None else weights.to(device)
    norm_rotate_store(
        heads,
        positions.to(device),
        table.to(device),
        on_device,
        cache,
        slots.to(device),
        eps=card.norm_eps,
    )
    torch.testing.assert_close(heads.cpu()[:, :6], expected, **tolerance(dtype))
    assert torch.equal(heads.cpu()[:, 6:], qkv.view(num_tokens, 12, head_dim)[:, 6:])
    torch.testing.assert_close(cache.cpu()[:, 0], expected_cache[:, 0], **tolerance(dtype))
    assert torch.equal(cache.cpu()[:, 1], expected_cache[:, 1])
    untouched = torch.ones(16 * (num_tokens + 1), dtype=torch.bool)
    untouched[slots[slots >= 0]] = False
    found, kept = cache.cpu()[:, 0].flatten(0, 1), expected_cache[:, 0].flatten(0, 1)
    assert torch.equal(found[untouched], kept[untouched])


@pytest.mark.gpu
def test_heads_are_stored_past_two_to_the_31_elements():
    from cgprof.models.heads_triton import norm_rotate_store

    blocks = 2**31 // (2 * 16 * 4 * 128) + 8
    cache = torch.zeros(blocks, 2, 16, 4, 128, dtype=torch.bfloat16, device="cuda")
    heads = torch.ones(1, 16, 128, dtype=torch.bfloat16, device="cuda")
    slots = torch.tensor([blocks * 16 - 1], device="cuda")
    position = torch.zeros(1, dtype=torch.int64, device="cuda")
    table = torch.ones(1, 128, device="cuda")
    norm_rotate_store(heads, position, table, None, cache, slots, eps=1e-6)
    assert cache[-1, 1, -1].eq(1).all()
    assert cache[-1, 0, -1, :, 64:].eq(2).all()


def check_swiglu(num_tokens, ffn_size, dtype, device):
    from cgprof.models.layers_triton import silu_and_mul_fused

    gate_up = normal(num_tokens, 2 * ffn_size).to(dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    found = silu_and_mul_fused(gate_up.to(device)).cpu()
    torch.testing.assert_close(found, expected, **tolerance(dtype))


def check_linear(num_tokens, num_in, num_out, dtype, device):
    from cgprof.models.linear_triton import linear_fixed_tiles

    x, weight = normal(num_tokens, num_in).to(dtype), normal(num_out, num_in, seed=1).to(dtype)
    expected = (x.double() @ weight.double().T) / num_in**0.5
    found = linear_fixed_tiles(x.to(device), weight.to(device)).cpu() / num_in**0.5
    torch.testing.assert_close(found.double(), expected, **tolerance(dtype))


NORMS = [(1, 32), (3, 40), (5, 100)]
HEADS = [(1, 16, True), (7, 24, True), (4, 16, False)]
SWIGLUS = [(1, 24), (3, 1030)]
LINEARS = [(1, 32, 48), (35, 40, 70)]
INTERPRETED = [torch.float32, torch.float16]
ON_GPU = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize(
    ("check", "sizes"),
    [
        (check_norm, NORMS),
        (check_heads, HEADS),
        (check_swiglu, SWIGLUS),
        (check_linear, LINEARS),
    ],
)
def test_fused_layers_equal_plain_when_interpreted(check, sizes, dtype):
    for size in sizes:
        run_interpreted(check, *size, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ON_GPU)
@pytest.mark.parametrize(
    ("check", "sizes"),
    [
        (check_norm, [*NORMS, (257, 2048), (3, 5120)]),
        (check_heads, [*HEADS, (257, 128, True), (33, 64, False)]),
        (check_swiglu, [*SWIGLUS, (257, 3072)]),
        (check_linear, [*LINEARS, (257, 1024, 130)]),
    ],
)
def test_fused_layers_equal_plain_on_gpu(check, sizes, dtype):
    for size in sizes:
        check(*size, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ON_GPU)
def test_fixed_tiles_do_not_depend_on_the_batch_on_gpu(dtype):
    from cgprof.models.linear_triton import linear_fixed_tiles

    x, weight = normal(300, 520).to("cuda", dtype), normal(200, 520, seed=1).to("cuda", dtype)
    whole = linear_fixed_tiles(x, weight)
    for rows in (slice(0, 1), slice(5, 22), slice(100, 300)):
        assert torch.equal(linear_fixed_tiles(x[rows], weight), whole[rows])


def test_layers_compile_for_hopper():
    from cgprof.models.heads_triton import _norm_rotate_store_kernel
    from cgprof.models.layers_triton import _add_rms_norm_kernel, _silu_and_mul_kernel
    from cgprof.models.linear_triton import _linear_kernel

    rows = {"residual": "*bf16", "x": "*bf16", "weight": "*bf16", "out": "*bf16", "eps": "fp32"}
    compile_for_hopper(_add_rms_norm_kernel, rows, {"ADD": True, "SIZE": 2048, "BLOCK": 2048})
    compile_for_hopper(
        _norm_rotate_store_kernel,
        {
            "heads": "*bf16",
            "positions": "*i64",
            "rope_table": "*fp32",
            "weights": "*bf16",
            "kv_cache": "*bf16",
            "slot_mapping": "*i64",
            "eps": "fp32",
            "stride_block": "i32",
            "stride_kv": "i32",
            "stride_slot": "i32",
        },
        {
            "NORM": True,
            "NUM_QUERY": 32,
            "NUM_KV": 4,
            "BLOCK_SIZE": 16,
            "HALF": 64,
            "BLOCK_H": 4,
            "BLOCK_HALF": 64,
        },
        num_warps=1,
    )
    compile_for_hopper(
        _silu_and_mul_kernel, {"gate_up": "*bf16", "out": "*bf16"}, {"FFN": 768, "BLOCK": 1024}
    )
    compile_for_hopper(
        _linear_kernel,
        {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "num_rows": "i32"},
        {"NUM_OUT": 5120, "NUM_IN": 2048, "BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 64},
        num_stages=3,
    )
