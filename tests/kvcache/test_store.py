import pytest
import torch

from cgprof.kvcache.store import store_kv
from tests.support.interpreter import run_module


def test_store_writes_each_token_to_its_slot():
    cache = torch.zeros(4, 2, 8, 2, 16)
    key, value = torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    store_kv(key, value, cache, torch.tensor([8, 31, 22]))
    for token, (block, offset) in enumerate(((1, 0), (3, 7), (2, 6))):
        assert torch.equal(cache[block, 0, offset], key[token])
        assert torch.equal(cache[block, 1, offset], value[token])
        cache[block, :, offset] = 0
    assert not cache.any()


def test_store_of_slot_minus_one_changes_no_bit():
    cache = torch.randn(3, 2, 4, 2, 16)
    cache[0] = torch.nan
    before = cache.clone()
    rows = torch.full((2, 2, 16), torch.inf)
    store_kv(rows, rows, cache, torch.tensor([-1, -1]))
    assert torch.equal(cache.view(torch.int32), before.view(torch.int32))


def test_store_takes_strided_views_of_one_projection():
    rows = torch.randn(5, 8, 16)
    key, value = rows[:, 4:6], rows[:, 6:]
    cache = torch.zeros(2, 2, 8, 2, 16)
    store_kv(key, value, cache, torch.arange(8, 13))
    assert torch.equal(cache[1, 0, :5], key)
    assert torch.equal(cache[1, 1, :5], value)


@pytest.mark.slow
def test_store_kernel_equals_the_plain_store():
    facts = run_module("tests.kvcache.interpreted_store", interpret=True)
    assert len(facts) == 3
    assert all(case["equal"] for case in facts.values()), facts


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim", "num_tokens"), [(4, 128, 257), (1, 64, 1), (2, 16, 33)])
def test_store_kernel_on_the_device_equals_the_plain_store(dtype, heads, dim, num_tokens):
    from cgprof.kvcache.store_triton import store_kv as store_kernel

    cache = torch.randn(40, 2, 16, heads, dim, dtype=dtype, device="cuda")
    expected = cache.clone()
    rows = torch.randn(num_tokens, 4 * heads, dim, dtype=dtype, device="cuda")
    key, value = rows[:, :heads], rows[:, heads : 2 * heads]
    slots = 16 + torch.randperm(39 * 16, device="cuda")[:num_tokens]
    slots[::3] = -1
    store_kv(key, value, expected, slots)
    store_kernel(key, value, cache, slots)
    assert torch.equal(cache, expected)


@pytest.mark.gpu
def test_store_kernel_reaches_past_two_to_the_31_elements():
    from cgprof.kvcache.store_triton import store_kv as store_kernel

    blocks = 2**31 // (2 * 16 * 4 * 128) + 8
    cache = torch.zeros(blocks, 2, 16, 4, 128, dtype=torch.bfloat16, device="cuda")
    rows = torch.ones(1, 4, 128, dtype=torch.bfloat16, device="cuda")
    store_kernel(rows, rows, cache, torch.tensor([blocks * 16 - 1], device="cuda"))
    assert cache[-1, :, -1].eq(1).all()
