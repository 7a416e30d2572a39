"""Where few decode rows lie when they are spread, and what each microbatch then sees."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cgprof.batch.context import AttentionMetadata, ForwardContext, InputBatch, PlainHandoff
from cgprof.microbatch.rule import last_microbatch_is_empty
from cgprof.microbatch.split import cut, fill, slice_context
from cgprof.microbatch.spread import can_spread, layout, regions
from cgprof.shapes import DecisionReason, RuntimeMode, StepDecision
from tests.support.graphs import decode, decode_key, prefill

STALE = 7777


@st.composite
def spreads(draw):
    """Real tokens, padded ones (odd too) and microbatches where spreading is called for."""
    count = draw(st.integers(2, 5))
    padded = draw(st.integers(2 * count, 300))
    return draw(st.integers(count, padded // count * (count - 1))), padded, count


def rows_of(spread):
    return [row for r in spread for row in range(r.start, r.start + r.num_tokens)]


def test_63_rows_of_128_are_32_at_0_and_31_at_64():
    first, second = regions(63, 128, 2)
    assert (first.start, first.stop, first.first_token, first.num_tokens) == (0, 64, 0, 32)
    assert (second.start, second.stop, second.first_token, second.num_tokens) == (64, 128, 32, 31)


def test_the_last_of_an_odd_size_has_the_rest_of_the_rows_and_the_fewest_tokens():
    spread = regions(4, 8, 3)
    assert [(r.start, r.stop) for r in spread] == [(0, 2), (2, 4), (4, 8)]
    assert rows_of(spread) == [0, 1, 2, 4]
    assert [r.num_tokens for r in spread] == [2, 1, 1]


@given(spreads())
def test_every_region_has_a_token_fits_its_rows_and_differs_by_at_most_one(case):
    real, padded, count = case
    spread = regions(real, padded, count)
    width = padded // count
    assert [r.start for r in spread] == [index * width for index in range(count)]
    assert [r.stop for r in spread] == [*(r.start for r in spread[1:]), padded]
    loads = [r.num_tokens for r in spread]
    assert sum(loads) == real
    assert min(loads) >= 1
    assert loads == sorted(loads, reverse=True)
    assert max(loads) - min(loads) <= 1
    assert max(loads) <= width
    tokens = [t for r in spread for t in range(r.first_token, r.first_token + r.num_tokens)]
    assert tokens == list(range(real))


@given(spreads(), st.integers(0, 300))
def test_only_ranks_that_do_not_reach_the_last_microbatch_are_laid_out_anew(case, other):
    real, padded, count = case
    key = decode_key(padded, num_microbatches=count)
    for tokens in (real, min(other, padded)):
        decision = StepDecision(
            key=key, tokens_per_rank=(tokens, padded), reason=DecisionReason.SPREAD
        )
        empty = last_microbatch_is_empty(tokens, padded, count)
        assert layout(decision, tokens) == (regions(tokens, padded, count) if empty else ())
        for reason in set(DecisionReason) - {DecisionReason.SPREAD}:
            assert layout(dataclasses.replace(decision, reason=reason), tokens) == ()
        eager = dataclasses.replace(decision, key=key.as_eager())
        assert layout(eager, tokens) == layout(decision, tokens)


def test_only_a_full_twin_of_one_token_a_request_is_spread():
    twin = decode_key(8, num_microbatches=2)
    assert can_spread(decode(8), twin, 2)
    assert not can_spread(decode(8), twin, 1)
    assert not can_spread(decode(8), twin, 0)
    assert not can_spread(decode(4, 2), twin, 4)
    assert not can_spread(prefill(8, 8), twin, 4)
    assert not can_spread(decode(8), decode_key(8), 4)
    for change in (
        {"mode": RuntimeMode.PIECEWISE},
        {"mode": RuntimeMode.NONE},
        {"uniform_query_len": None},
        {"num_reqs": None},
        {"num_reqs": 7},
    ):
        assert not can_spread(decode(8), dataclasses.replace(twin, **change), 4), change


def step_of(spread, padded, computed):
    """Query starts [R+1] and lengths [R] of the step, in row order; gaps have no token."""
    query, lens = np.zeros(padded, np.int32), np.zeros(padded, np.int32)
    rows = rows_of(spread)
    query[rows] = 1
    lens[rows] = computed + 1
    return np.concatenate([[0], np.cumsum(query)]).astype(np.int32), lens


def parts_of(real, padded, count, computed):
    spread = regions(real, padded, count)
    key = decode_key(padded, num_microbatches=count)
    parts = cut(np.ones(real, np.int32), key, padded, spread)
    starts = np.full((count, padded + 3), STALE, np.int32)
    lens = np.full((count, padded + 2), STALE, np.int32)
    fill(parts, *step_of(spread, padded, computed), starts, lens)
    return spread, parts, starts, lens


@given(spreads())
def test_a_microbatch_holds_its_own_tokens_first_and_rows_of_length_0_after_them(case):
    real, padded, count = case
    computed = np.arange(real, dtype=np.int32) * 3 + 5
    spread, parts, starts, lens = parts_of(real, padded, count, computed)
    found = []
    for part in parts:
        assert part.token_slice == part.req_slice
        rows = part.num_reqs
        query = np.diff(starts[part.index, : rows + 1])
        assert query.tolist() == [1] * part.num_real_tokens + [0] * (rows - part.num_real_tokens)
        assert starts[part.index, 0] == 0
        # Token i of the microbatch is of its request i, so rows of tokens and requests agree.
        found += [
            (part.req_slice.start + row, lens[part.index, row]) for row in np.flatnonzero(query)
        ]
        assert (lens[part.index, :rows][query == 0] == 0).all()
        assert (starts[part.index, rows:] == part.num_real_tokens).all()
        assert (lens[part.index, rows:] == 0).all()
    assert found == list(zip(rows_of(spread), computed + 1, strict=True))


@given(spreads())
def test_cut_without_spreading_is_unmoved_by_it(case):
    real, padded, count = case
    key, query_lens = decode_key(padded, num_microbatches=count), np.ones(real, np.int32)
    compact, spread = cut(query_lens, key, padded), cut(query_lens, key, padded, ())
    assert compact == spread
    moved = cut(query_lens, key, padded, regions(real, padded, count))
    # A graph has frozen these.
    assert [p.req_slice for p in moved] == [p.req_slice for p in compact]
    assert [p.token_slice for p in moved] == [p.token_slice for p in compact]


@pytest.mark.parametrize(("real", "padded", "count"), [(3, 8, 2), (4, 8, 2), (4, 7, 3), (5, 11, 4)])
def test_contexts_of_spread_microbatches_tell_their_own_share(real, padded, count):
    computed = np.arange(real, dtype=np.int32)
    spread, parts, starts, lens = parts_of(real, padded, count, computed)
    whole_starts, whole_lens = step_of(spread, padded, computed)
    tokens = torch.arange(padded)
    whole = ForwardContext(
        batch=InputBatch(
            shape=decode(real),
            padded=decode_key(padded, num_microbatches=count),
            input_ids=tokens.int(),
            positions=tokens,
            is_padding=torch.from_numpy(whole_lens == 0),
        ),
        attention=AttentionMetadata(
            query_start_loc=torch.from_numpy(whole_starts),
            seq_lens=torch.from_numpy(whole_lens),
            block_table=tokens.int()[:, None],
            slot_mapping=tokens,
            max_query_len=1,
            max_seq_len=64,
        ),
        tokens_per_rank=(padded,),
        handoff=PlainHandoff(),
    )
    for region, part in zip(spread, parts, strict=True):
        context = slice_context(
            whole, part, torch.from_numpy(starts), torch.from_numpy(lens), PlainHandoff()
        )
        assert context.batch.shape == decode(region.num_tokens)
        assert context.batch.padded.num_tokens == region.stop - region.start
        assert context.attention.block_table[:, 0].tolist() == list(
            range(region.start, region.stop)
        )
        real_rows = (~context.batch.is_padding).tolist()
        assert real_rows == (context.attention.seq_lens > 0).tolist()
        assert context.attention.query_start_loc[-1] == region.num_tokens
