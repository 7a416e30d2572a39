"""Cutting and slicing: nothing is lost, each token keeps its request and its position."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cgprof.batch.context import AttentionMetadata, ForwardContext, InputBatch, PlainHandoff
from cgprof.errors import MicrobatchError
from cgprof.microbatch.rule import last_microbatch_is_empty
from cgprof.microbatch.split import cut, fill, slice_context
from cgprof.shapes import BatchShape, GraphKey, RuntimeMode

STALE = 7777


def ints(*values):
    return np.array(values, np.int32)


def eager_key(num_tokens, num_microbatches=2):
    return GraphKey(mode=RuntimeMode.NONE, num_tokens=num_tokens, num_microbatches=num_microbatches)


def twin_key(num_reqs, query_len=1, num_microbatches=2):
    return GraphKey(
        mode=RuntimeMode.FULL,
        num_tokens=num_reqs * query_len,
        num_reqs=num_reqs,
        uniform_query_len=query_len,
        num_microbatches=num_microbatches,
    )


def parents(query_lens, computed, num_reqs):
    """The step's query starts [R+1] and lengths [R]."""
    starts = np.zeros(num_reqs + 1, np.int32)
    starts[1 : len(query_lens) + 1] = np.cumsum(query_lens)
    starts[len(query_lens) + 1 :] = query_lens.sum()
    lens = np.zeros(num_reqs, np.int32)
    lens[: len(query_lens)] = query_lens + computed
    return starts, lens


def stale_buffers(num_microbatches, num_reqs):
    return (
        np.full((num_microbatches, num_reqs + 1), STALE, np.int32),
        np.full((num_microbatches, num_reqs), STALE, np.int32),
    )


def filled(query_lens, computed, key, num_reqs, spare=3):
    microbatches = cut(query_lens, key, num_reqs)
    starts, lens = stale_buffers(key.num_microbatches, num_reqs + spare)
    fill(microbatches, *parents(query_lens, computed, num_reqs), starts, lens)
    return microbatches, starts, lens


@st.composite
def mixed_steps(draw):
    query_lens = np.array(draw(st.lists(st.integers(1, 40), min_size=1, max_size=12)), np.int32)
    computed = np.array(
        draw(st.lists(st.integers(0, 50), min_size=len(query_lens), max_size=len(query_lens))),
        np.int32,
    )
    count = draw(st.integers(2, 5))
    tokens = max(int(query_lens.sum()) + draw(st.integers(0, 30)), count)
    reqs = len(query_lens) + draw(st.integers(0, 4))
    return query_lens, computed, eager_key(tokens, count), reqs


@given(mixed_steps())
@settings(deadline=None)
def test_cut_partitions_tokens_and_reaches_every_padded_request(step):
    query_lens, _, key, num_reqs = step
    microbatches = cut(query_lens, key, num_reqs)
    tokens = [t for m in microbatches for t in range(m.token_slice.start, m.token_slice.stop)]
    assert tokens == list(range(key.num_tokens))
    assert [m.index for m in microbatches] == list(range(key.num_microbatches))
    assert sum(m.num_real_tokens for m in microbatches) == query_lens.sum()
    assert {r for m in microbatches for r in range(m.req_slice.start, m.req_slice.stop)} == set(
        range(num_reqs)
    )


@given(mixed_steps())
@settings(deadline=None)
def test_fill_keeps_the_request_and_position_of_every_token(step):
    query_lens, computed, key, num_reqs = step
    microbatches, starts, lens = filled(query_lens, computed, key, num_reqs)
    found = []
    for part in microbatches:
        for row in range(part.num_reqs):
            first, stop = starts[part.index, row : row + 2]
            length = lens[part.index, row]
            found += [
                (part.token_slice.start + token, part.req_slice.start + row, length - stop + token)
                for token in range(first, stop)
            ]
    wanted = [
        (request, computed[request] + offset)
        for request, query_len in enumerate(query_lens)
        for offset in range(query_len)
    ]
    assert [token for token, _, _ in found] == list(range(len(wanted)))
    assert [(request, position) for _, request, position in found] == wanted


@given(mixed_steps())
@settings(deadline=None)
def test_fill_conserves_query_lengths_and_rewrites_stale_rows(step):
    query_lens, computed, key, num_reqs = step
    microbatches, starts, lens = filled(query_lens, computed, key, num_reqs)
    total = np.zeros(num_reqs, np.int64)
    for part in microbatches:
        rows = part.num_reqs
        total[part.req_slice] += np.diff(starts[part.index, : rows + 1])
        assert starts[part.index, 0] == 0
        assert (starts[part.index, rows:] == part.num_real_tokens).all()
        assert (lens[part.index, rows:] == 0).all()
    assert (total[: len(query_lens)] == query_lens).all()
    assert (total[len(query_lens) :] == 0).all()
    assert STALE not in starts
    assert STALE not in lens


def test_fill_counts_tokens_of_an_earlier_microbatch_but_not_of_a_later_one():
    # 10 tokens in the cache, 12 run now: 4 | 4 | 4.
    microbatches, starts, lens = filled(ints(12), ints(10), eager_key(12, 3), 1, spare=0)
    assert [m.req_slice for m in microbatches] == [slice(0, 1)] * 3
    assert starts.tolist() == [[0, 4], [0, 4], [0, 4]]
    assert lens.tolist() == [[14], [18], [22]]


def test_cut_gives_the_rest_to_the_last_and_shares_a_straddling_request():
    first, second, third = cut(ints(3, 5, 3), eager_key(11, 3), 5)
    assert [m.token_slice for m in (first, second, third)] == [
        slice(0, 3),
        slice(3, 6),
        slice(6, 11),
    ]
    assert [m.req_slice for m in (first, second, third)] == [
        slice(0, 1),
        slice(1, 2),
        slice(1, 5),
    ]


def test_uniform_key_of_16_keeps_its_split_for_9_requests_and_the_rule_refuses_8():
    whole = cut(np.ones(16, np.int32), twin_key(16), 16)
    nine = cut(np.ones(9, np.int32), twin_key(16), 16)
    assert (
        [m.req_slice for m in nine] == [m.req_slice for m in whole] == [slice(0, 8), slice(8, 16)]
    )
    assert [m.num_real_tokens for m in nine] == [8, 1]
    assert not last_microbatch_is_empty(9, 16, 2)
    assert last_microbatch_is_empty(8, 16, 2)


@given(st.integers(2, 5), st.integers(1, 4), st.integers(1, 24), st.data())
@settings(deadline=None)
def test_uniform_key_splits_requests_alike_for_every_batch(count, query_len, num_reqs, data):
    key = twin_key(num_reqs, query_len, count)
    if key.num_tokens < count:
        return
    real = data.draw(st.integers(1, num_reqs))
    whole = cut(np.full(num_reqs, query_len, np.int32), key, num_reqs)
    part = cut(np.full(real, query_len, np.int32), key, num_reqs)
    assert [m.req_slice for m in part] == [m.req_slice for m in whole]
    empty = part[-1].num_real_tokens == 0
    assert empty == last_microbatch_is_empty(real * query_len, key.num_tokens, count)


def test_microbatches_wholly_in_padding_hold_the_last_request_without_tokens():
    microbatches, starts, lens = filled(ints(2, 3), ints(4, 5), eager_key(20, 4), 2, spare=0)
    assert [m.num_real_tokens for m in microbatches] == [5, 0, 0, 0]
    assert [m.req_slice for m in microbatches[1:]] == [slice(1, 2)] * 3
    assert starts[1:].max() == 0
    assert lens[1:].tolist() == [[8, 0]] * 3


@pytest.mark.parametrize(
    ("query_lens", "key", "num_reqs", "problem"),
    [
        (ints(1, 1, 1), eager_key(8), 2, "3 requests"),
        (ints(5, 4), eager_key(8), 4, "9 tokens"),
        (ints(1), eager_key(1), 1, "cannot be cut"),
        (ints(1, 2), twin_key(8), 8, "do not all fit key FULL-8x8q1-mb2"),
    ],
)
def test_cut_refuses_a_batch_outside_the_key(query_lens, key, num_reqs, problem):
    with pytest.raises(MicrobatchError, match=problem):
        cut(query_lens, key, num_reqs)


def test_fill_refuses_buffers_that_are_too_small():
    query_lens = ints(1, 1, 1, 1)
    microbatches = cut(query_lens, eager_key(4), 4)
    step = parents(query_lens, ints(0, 0, 0, 0), 4)
    with pytest.raises(MicrobatchError, match="do not fit the buffers"):
        fill(microbatches, *step, *stale_buffers(2, 1))
    with pytest.raises(MicrobatchError, match="do not fit the buffers"):
        fill(microbatches, *step, *stale_buffers(1, 4))


def whole_context(query_lens, key, num_reqs, num_prefills=0):
    tokens = key.num_tokens
    starts, lens = parents(query_lens, np.zeros_like(query_lens), num_reqs)
    return ForwardContext(
        batch=InputBatch(
            shape=BatchShape(
                num_reqs=len(query_lens),
                num_tokens=int(query_lens.sum()),
                max_query_len=int(query_lens.max()),
                num_prefills=num_prefills,
            ),
            padded=key,
            input_ids=torch.arange(tokens, dtype=torch.int32),
            positions=torch.arange(tokens),
            is_padding=torch.arange(tokens) >= int(query_lens.sum()),
        ),
        attention=AttentionMetadata(
            query_start_loc=torch.from_numpy(starts),
            seq_lens=torch.from_numpy(lens),
            block_table=torch.arange(num_reqs * 2, dtype=torch.int32).view(num_reqs, 2),
            slot_mapping=torch.arange(tokens),
            max_query_len=int(query_lens.max()),
            max_seq_len=64,
        ),
        tokens_per_rank=(int(query_lens.sum()), tokens // 2 - 1),
        handoff=PlainHandoff(),
    )


def sliced(query_lens, key, num_reqs, num_prefills=0):
    context = whole_context(query_lens, key, num_reqs, num_prefills)
    starts, lens = (torch.from_numpy(b) for b in stale_buffers(key.num_microbatches, num_reqs))
    parts = cut(query_lens, key, num_reqs)
    handoffs = [PlainHandoff() for _ in parts]
    pairs = zip(parts, handoffs, strict=True)
    contexts = [slice_context(context, part, starts, lens, handoff) for part, handoff in pairs]
    return context, contexts, starts, lens, handoffs


def test_slice_context_takes_views_and_only_starts_and_lengths_are_its_own():
    context, parts, starts, lens, handoffs = sliced(np.ones(9, np.int32), twin_key(16), 16)
    for name in ("input_ids", "positions", "is_padding"):
        whole = getattr(context.batch, name)
        views = [getattr(part.batch, name) for part in parts]
        assert torch.equal(torch.cat(views), whole)
        assert {v.untyped_storage().data_ptr() for v in views} == {whole.data_ptr()}
    for name in ("slot_mapping", "block_table"):
        whole = getattr(context.attention, name)
        views = [getattr(part.attention, name) for part in parts]
        assert torch.equal(torch.cat(views), whole)
        assert {v.untyped_storage().data_ptr() for v in views} == {whole.data_ptr()}
    for index, part in enumerate(parts):
        assert part.attention.query_start_loc.data_ptr() == starts[index].data_ptr()
        assert part.attention.query_start_loc.shape == (9,)
        assert part.attention.seq_lens.data_ptr() == lens[index].data_ptr()
        assert part.attention.seq_lens.shape == (8,)
        assert part.handoff is handoffs[index]
    assert [part.tokens_per_rank for part in parts] == [(8, 7), (1, 0)]


def test_slice_context_of_a_uniform_key_has_the_keys_bounds():
    _, parts, *_ = sliced(np.full(3, 3, np.int32), twin_key(4, query_len=3), 4)
    assert [part.attention.max_query_len for part in parts] == [3, 3]
    assert [part.attention.max_seq_len for part in parts] == [64, 64]
    assert [str(part.batch.padded) for part in parts] == ["FULL-6x2q3"] * 2
    assert [part.batch.shape.num_tokens for part in parts] == [6, 3]
    assert [part.batch.shape.num_reqs for part in parts] == [2, 1]


def test_slice_context_of_a_mixed_step_narrows_the_shape_of_each_part():
    # Two decodes, then a prefill of 10 that straddles the cut at 6.
    _, (first, second), *_ = sliced(ints(1, 1, 10), eager_key(12), 3, num_prefills=1)
    assert first.batch.shape == BatchShape(
        num_reqs=3, num_tokens=6, max_query_len=6, num_prefills=1
    )
    assert second.batch.shape == BatchShape(
        num_reqs=1, num_tokens=6, max_query_len=6, num_prefills=1
    )
    assert [part.attention.max_query_len for part in (first, second)] == [6, 6]
    assert [part.batch.padded for part in (first, second)] == [
        GraphKey(mode=RuntimeMode.NONE, num_tokens=6)
    ] * 2


def test_slice_context_refuses_a_step_smaller_than_the_microbatch():
    key = eager_key(8)
    context = whole_context(ints(4, 4), key, 2)
    small = dataclasses.replace(
        context, batch=dataclasses.replace(context.batch, input_ids=context.batch.input_ids[:7])
    )
    starts, lens = (torch.from_numpy(b) for b in stale_buffers(2, 2))
    last = cut(ints(4, 4), key, 2)[-1]
    with pytest.raises(MicrobatchError, match="tokens to 8"):
        slice_context(small, last, starts, lens, PlainHandoff())
    with pytest.raises(MicrobatchError, match="do not fit the buffers"):
        slice_context(context, last, starts[:1], lens[:1], PlainHandoff())
