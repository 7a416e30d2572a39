import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


def _attend(batch: PagedBatch, chunk_tokens: int = 128) -> torch.Tensor:
    backend = ReferenceAttention(chunk_tokens)
    return store_and_attend(backend, batch)


def _clone(batch: PagedBatch) -> PagedBatch:
    return dataclasses.replace(batch, kv_cache=batch.kv_cache.clone())


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(
    "dims",
    [
        Dims(),
        Dims(num_heads=2, num_kv_heads=2, head_dim=8, block_size=8),
        Dims(num_heads=8, num_kv_heads=1, head_dim=64),
    ],
    ids=["group2", "group1", "group8"],
)
def test_reference_equals_dense_attention_beside_nan(name, dims):
    batch = named_batch(name, dims=dims)
    facts = differences(batch, _attend(batch))
    assert facts["max_abs_diff"] < 2e-6
    assert facts["padding_not_zero"] == facts["kv_wrong"] == 0


def test_reference_of_bfloat16_accumulates_in_float32():
    batch = make_batch([1, 30], [257, 40], dtype=torch.bfloat16)
    out = _attend(batch)
    assert out.dtype == torch.bfloat16
    # One rounding of a float32 result that is right to 2e-6.
    torch.testing.assert_close(out.float(), dense_attention(batch), rtol=2**-8, atol=2e-6)


def test_reference_reaches_a_context_of_4096_beside_short_ones():
    batch = make_batch([1, 1, 1, 1, 1, 1], [1, 15, 16, 17, 257, 4096])
    assert differences(batch, _attend(batch))["max_abs_diff"] < 2e-6


def test_reference_does_not_depend_on_the_chunk():
    batch = named_batch("prefill beside decodes")
    assert torch.allclose(_attend(_clone(batch), 32), _attend(batch, 512), atol=2e-6)


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [1, 1, 12]])
def test_reference_is_bitwise_the_same_with_room_for_longer_contexts(query_lens):
    short = make_batch(query_lens, [3, 17, 100], max_seq_len=128)
    room = make_batch(query_lens, [3, 17, 100], max_seq_len=1000)
    assert torch.equal(_attend(short), _attend(room))


def test_reference_is_bitwise_the_same_with_more_padding():
    tight = make_batch([1, 1, 12], [3, 17, 100])
    padded = make_batch([1, 1, 12], [3, 17, 100], pad_tokens=50, pad_reqs=9)
    assert torch.equal(_attend(tight), _attend(padded)[:14])


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [0, 2, 5]])
def test_reference_gives_zeros_to_requests_of_length_zero(query_lens):
    batch = make_batch(query_lens, [9, 5, 40], max_query_len=max(query_lens))
    batch.metadata.seq_lens[1] = 0
    out = _attend(batch)
    first, last = batch.metadata.query_start_loc[1:3].tolist()
    assert not out[first:last].any()
    assert torch.isfinite(out).all()
    assert out[last:].abs().sum() > 0


@pytest.mark.parametrize("cut", [1, 9, 22])
def test_reference_of_parts_equals_the_whole(cut):
    batch = make_batch([1, 21, 1], [17, 70, 90])
    whole = _attend(_clone(batch))
    parts = [
        _attend(cut_batch(_clone(batch), first, last)) for first, last in ((0, cut), (cut, 23))
    ]
    assert torch.allclose(torch.cat(parts), whole, atol=2e-6)


def test_reference_of_8_then_3_then_8_requests_leaves_the_others_alone():
    batch = make_batch([1] * 8, [1, 15, 16, 17, 257, 40, 33, 2])
    whole = _attend(batch)
    stored = batch.kv_cache.clone()
    few = _attend(drop_requests(batch, 3))
    assert torch.equal(few[:3], whole[:3])
    assert not few[3:].any()
    assert torch.equal(batch.kv_cache.view(torch.int32), stored.view(torch.int32))
    assert torch.equal(_attend(batch), whole)


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        if func is torch.ops.aten.index.Tensor:
            assert all(index.dtype == torch.int64 for index in args[1])
        return func(*args, **(kwargs or {}))


def _operators(query_lens: list[int], seq_lens: list[int], **padding: int) -> list[str]:
    batch = make_batch(query_lens, seq_lens, max_seq_len=300, max_query_len=20, **padding)
    with _Operators() as seen:
        _attend(batch)
    return seen.names


def test_reference_runs_the_same_operators_whatever_the_lengths():
    names = _operators([1, 1, 18], [257, 3, 40])
    assert names == _operators([20], [20], pad_reqs=2)
    hosts = {"aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"}
    assert not hosts & set(names)
