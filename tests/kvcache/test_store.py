import torch

from cgprof.kvcache.store import store_kv


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
