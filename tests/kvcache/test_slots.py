import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cgprof.kvcache.block_table import BlockTable
from cgprof.kvcache.pool import BlockPool
from cgprof.kvcache.slots import compute_slots, token_positions


def _ints(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


def _slots(table, starts, query_lens, block_size):
    positions, out = np.empty((2, int(query_lens.sum())), np.int64)
    token_positions(starts, query_lens, positions)
    token_rows = np.repeat(np.arange(query_lens.size), query_lens)
    compute_slots(table, token_rows, positions, block_size, out)
    return out


def test_positions_count_up_from_each_start():
    out = np.empty(6, np.int64)
    token_positions(_ints([5, 0, 15, 9]), _ints([1, 3, 2, 0]), out)
    assert out.tolist() == [5, 0, 1, 2, 15, 16]


def test_slots_follow_the_table_across_a_block_edge():
    out = _slots(_ints([[7, 0, 0], [3, 9, 4]]), _ints([2, 3]), _ints([1, 3]), 4)
    assert out.tolist() == [7 * 4 + 2, 3 * 4 + 3, 9 * 4, 9 * 4 + 1]


def test_slots_past_two_to_the_31_do_not_wrap():
    out = _slots(_ints([[2**28]]), _ints([1]), _ints([1]), 16)
    assert out.tolist() == [2**32 + 1]


requests = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 24)), min_size=1, max_size=6)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(requests, st.sampled_from([1, 4, 16]))
def test_slots_never_collide_and_agree_with_a_loop(lengths, block_size):
    starts, query_lens = (_ints(list(column)) for column in zip(*lengths, strict=True))
    width = 64 // block_size
    table = BlockTable(len(lengths), width, block_size, BlockPool(1 + width * len(lengths)))
    table.ensure(np.arange(len(lengths), dtype=np.int32), starts + query_lens)
    out = _slots(table.array, starts, query_lens, block_size)
    expected = [
        int(table.array[r, p // block_size]) * block_size + p % block_size
        for r, (start, length) in enumerate(lengths)
        for p in range(start, start + length)
    ]
    assert out.tolist() == expected
    assert len(set(expected)) == len(expected)
