"""The kernels against the oracle: interpreted and cross-compiled anywhere, and on a device."""

import dataclasses

import pytest
import torch

from cgprof.attention.paged import PagedAttention
from cgprof.attention.reference import ReferenceAttention
from tests.support.attention import (
    BATCHES,
    Dims,
    PagedBatch,
    cut_batch,
    dense_attention,
    differences,
    drop_requests,
    make_batch,
    named_batch,
    store_and_attend,
)
from tests.support.interpreter import run_module

QWEN = Dims(num_heads=32, num_kv_heads=4, head_dim=128)
# Relative and absolute: two roundings of the output's dtype, and one of the weights.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}


@pytest.mark.slow
def test_kernels_equal_dense_attention_in_the_interpreter():
    facts = run_module("tests.attention.interpreted_paged", interpret=True)
    assert len(facts) == len(BATCHES) + 6
    for name, case in facts.items():
        limit = 2e-3 if name.startswith("float16") else 2e-6
        assert case["max_abs_diff"] < limit, (name, case)
        assert case["padding_not_zero"] == case["kv_wrong"] == 0, (name, case)


@pytest.mark.slow
def test_kernels_compile_for_sm_90_within_its_shared_memory():
    facts = run_module("tests.attention.compiled_kernels", interpret=False)
    assert len(facts) == 5
    for name, kernel in facts.items():
        assert kernel["shared_bytes"] <= 227 * 1024, (name, kernel)
        if "bf16" in name or "fp16" in name:
            assert kernel["tensor_core"] > 0, (name, kernel)
            assert kernel["async_copies"] > 0, (name, kernel)


def _attend(batch: PagedBatch, dims: Dims, *, invariant: bool = False) -> torch.Tensor:
    backend = PagedAttention(
        num_heads=dims.num_heads,
        num_kv_heads=dims.num_kv_heads,
        head_dim=dims.head_dim,
        dtype=batch.query.dtype,
        batch_invariant=invariant,
    )
    return store_and_attend(backend, batch)


def _check(batch: PagedBatch, out: torch.Tensor) -> None:
    limit = TOLERANCES[out.dtype]
    torch.testing.assert_close(out.float(), dense_attention(batch), rtol=limit, atol=limit / 4)
    facts = differences(batch, out)
    assert facts["padding_not_zero"] == facts["kv_wrong"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(
    ("dims", "dtype"),
    [
        (QWEN, torch.bfloat16),
        (QWEN, torch.float16),
        (QWEN, torch.float32),
        (Dims(), torch.bfloat16),
        (Dims(), torch.float32),
        (Dims(num_heads=4, num_kv_heads=4, head_dim=64), torch.bfloat16),
        (Dims(num_heads=9, num_kv_heads=3, head_dim=64), torch.bfloat16),
        (Dims(num_heads=16, num_kv_heads=4, head_dim=64, block_size=32), torch.bfloat16),
        (Dims(num_heads=20, num_kv_heads=1, head_dim=256), torch.bfloat16),
    ],
    ids=str,
)
def test_kernels_on_the_device_equal_dense_attention(dims, dtype, invariant):
    for name in BATCHES:
        batch = named_batch(name, dims=dims, dtype=dtype, device="cuda")
        _check(batch, _attend(batch, dims, invariant=invariant))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("query_lens", "pad_tokens", "pad_reqs"),
    [([1] * 6, 2, 2), ([1] * 6, 250, 250), ([1, 1, 1, 1, 1, 131], 376, 58)],
)
def test_kernels_on_the_device_reach_4096_beside_short_contexts(
    dtype, query_lens, pad_tokens, pad_reqs
):
    seq_lens = [1, 15, 16, 17, 257, 4096]
    batch = make_batch(
        query_lens,
        seq_lens,
        dims=QWEN,
        pad_tokens=pad_tokens,
        pad_reqs=pad_reqs,
        dtype=dtype,
        device="cuda",
    )
    _check(batch, _attend(batch, QWEN))


@pytest.mark.gpu
def test_kernels_on_the_device_equal_the_reference_for_a_long_prefill():
    batch = make_batch([1500, 1, 547], [1500, 3000, 800], dims=QWEN, dtype=torch.bfloat16)
    batch = dataclasses.replace(
        batch,
        **{
            name: getattr(batch, name).cuda()
            for name in ("query", "key", "value", "kv_cache", "live_slots")
        },
        dense=[(keys.cuda(), values.cuda()) for keys, values in batch.dense],
        metadata=_on_device(batch),
    )
    expected = store_and_attend(ReferenceAttention(), batch)
    out = _attend(batch, QWEN)
    torch.testing.assert_close(out, expected, rtol=2**-6, atol=2**-8)
    _check(batch, out)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_invariant_kernels_give_a_token_the_same_bits_in_any_batch(dtype):
    query_lens, seq_lens = [1, 1, 301, 1, 40], [17, 4096, 700, 257, 40]
    settings = {"dims": QWEN, "dtype": dtype, "device": "cuda", "max_seq_len": 4096}
    batch = make_batch(query_lens, seq_lens, pad_tokens=168, pad_reqs=59, **settings)
    whole = _attend(batch, QWEN, invariant=True)[:344]
    batch = make_batch(query_lens, seq_lens, **settings)
    for cut in (1, 2, 150, 303, 304, 311):
        for first, last in ((0, cut), (cut, 344)):
            part = cut_batch(batch, first, last)
            assert torch.equal(_attend(part, QWEN, invariant=True), whole[first:last]), cut


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 3, 64, 256])
def test_invariant_kernels_give_decodes_the_same_bits_at_any_size(size):
    seq_lens = [1 + (97 * i) % 400 for i in range(256)]
    settings = {"dims": QWEN, "dtype": torch.bfloat16, "device": "cuda"}
    batch = make_batch([1] * 256, seq_lens, **settings)
    whole = _attend(batch, QWEN, invariant=True)
    part = _attend(cut_batch(batch, 0, size), QWEN, invariant=True)
    assert torch.equal(part, whole[:size])


@pytest.mark.gpu
@pytest.mark.parametrize("max_query_len", [1, 8], ids=["decode", "any"])
@pytest.mark.parametrize("invariant", [False, True])
def test_capture_replays_right_at_other_lengths_and_sizes(max_query_len, invariant):
    settings = {
        "dims": QWEN,
        "dtype": torch.bfloat16,
        "device": "cuda",
        "max_seq_len": 4096,
        "max_query_len": max_query_len,
        "num_blocks": 700,
    }
    captured = make_batch([1] * 8, [16] * 8, **settings)
    _attend(captured, QWEN, invariant=invariant)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = _attend(captured, QWEN, invariant=invariant)

    mixed = make_batch([1] * 8, [1, 15, 16, 17, 257, 4096, 1023, 64], seed=1, **settings)
    other = make_batch([1] * 8, [4000, 2, 300, 31, 32, 33, 1, 9], seed=2, **settings)
    steps = [mixed, drop_requests(other, 3), other]
    if max_query_len > 1:
        layout = settings | {"pad_reqs": 5, "pad_tokens": 1}
        steps.append(make_batch([1, 5, 1], [300, 2000, 1], seed=3, **layout))
        steps.append(make_batch([8], [8], seed=4, **(settings | {"pad_reqs": 7})))
    for step in steps:
        _copy_into(captured, step)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        replayed = out.clone()
        assert torch.equal(replayed, _attend(step, QWEN, invariant=invariant))
        num_real = int(step.metadata.query_start_loc[-1])
        expected = dense_attention(step)[:num_real]
        torch.testing.assert_close(replayed[:num_real].float(), expected, rtol=2**-6, atol=2**-8)
        assert not replayed[num_real:].any()


def _on_device(batch: PagedBatch):
    fields = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
    moved = {name: getattr(batch.metadata, name).cuda() for name in fields}
    return dataclasses.replace(batch.metadata, **moved)


def _copy_into(target: PagedBatch, source: PagedBatch) -> None:
    for name in ("query", "key", "value", "kv_cache"):
        getattr(target, name).copy_(getattr(source, name))
    for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
        getattr(target.metadata, name).copy_(getattr(source.metadata, name))
