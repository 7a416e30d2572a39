import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgprof.errors import ConfigError
from cgprof.kvcache.block_table import BlockTable
from cgprof.kvcache.pool import BlockPool


def _table(num_blocks: int = 40, reqs: int = 4, width: int = 4, size: int = 16) -> BlockTable:
    return BlockTable(reqs, width, size, BlockPool(num_blocks))


def _ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_ensure_grows_rows_by_whole_blocks():
    table = _table()
    table.ensure(_ints(2, 0), _ints(17, 16))
    assert table.num_blocks.tolist() == [1, 0, 2, 0]
    before = table.array.copy()
    table.ensure(_ints(0, 2), _ints(16, 32))
    assert np.array_equal(table.array, before)
    table.ensure(_ints(0), _ints(33))
    assert table.num_blocks.tolist() == [3, 0, 2, 0]
    assert np.array_equal(table.array[2], before[2])
    assert table.array[0, 0] == before[0, 0]


def test_ensure_never_shrinks_a_row():
    table = _table()
    table.ensure(_ints(1), _ints(64))
    table.ensure(_ints(1), _ints(1))
    assert table.num_blocks[1] == 4


def test_ensure_without_room_changes_nothing():
    pool = BlockPool(4)
    table = BlockTable(4, 4, 16, pool)
    table.ensure(_ints(0), _ints(16))
    array = table.array.copy()
    with pytest.raises(ConfigError, match="3 KV blocks are wanted, 2 of 3"):
        table.ensure(_ints(0, 1), _ints(32, 32))
    assert np.array_equal(table.array, array)
    assert table.num_blocks.tolist() == [1, 0, 0, 0]
    assert pool.num_free == 2


def test_ensure_past_the_table_names_the_flag_and_takes_nothing():
    pool = BlockPool(40)
    table = BlockTable(2, 4, 16, pool)
    with pytest.raises(ConfigError, match=r"--max-model-len: a request needs 65 .* hold 64"):
        table.ensure(_ints(0, 1), _ints(1, 65))
    assert pool.num_free == 39


def test_release_zeroes_the_row_and_gives_blocks_back():
    pool = BlockPool(9)
    table = BlockTable(4, 4, 16, pool)
    table.ensure(_ints(0, 3), _ints(50, 30))
    table.release(0)
    assert not table.array[0].any()
    assert table.num_blocks.tolist() == [0, 0, 0, 2]
    assert pool.num_free == 6


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 64)), max_size=30))
def test_rows_never_share_a_block_and_never_hold_block_0(steps):
    pool = BlockPool(17)
    table = BlockTable(4, 4, 16, pool)
    for row, num_tokens in steps:
        if num_tokens:
            table.ensure(_ints(row), _ints(num_tokens))
        else:
            table.release(row)
        owned = [b for r in range(4) for b in table.array[r, : table.num_blocks[r]].tolist()]
        assert len(owned) == len(set(owned)) == 16 - pool.num_free
        assert 0 not in owned
        assert np.count_nonzero(table.array) == len(owned)
