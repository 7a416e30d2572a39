import pytest

from cgprof.errors import ConfigError
from cgprof.kvcache.pool import BlockPool


def test_pool_hands_out_every_block_but_block_0_once():
    pool = BlockPool(6)
    blocks = pool.allocate(2) + pool.allocate(3)
    assert sorted(blocks) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0
    assert pool.num_blocks == 6


def test_pool_that_is_too_small_says_numbers_and_flags_and_takes_nothing():
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(ConfigError) as caught:
        pool.allocate(3)
    message = str(caught.value)
    for part in ("3 KV blocks", "2 of 3", "--num-gpu-blocks-override", "--max-num-seqs"):
        assert part in message
    assert pool.num_free == 2


def test_pool_of_one_block_is_refused():
    with pytest.raises(ConfigError, match="block 0 is reserved"):
        BlockPool(1)


def test_pool_reuses_freed_blocks():
    pool = BlockPool(5)
    blocks = pool.allocate(4)
    pool.free(blocks[1:3])
    assert pool.allocate(2) == blocks[1:3]


@pytest.mark.parametrize("freed", [[1, 1], [2], [0]])
def test_pool_refuses_a_block_that_is_not_taken_and_frees_nothing(freed):
    pool = BlockPool(5)
    assert pool.allocate(1) == [1]
    with pytest.raises(ValueError, match="freed"):
        pool.free(freed)
    assert pool.num_free == 3
    pool.free([1])
    with pytest.raises(ValueError, match="not taken"):
        pool.free([1])


def test_pool_allocation_of_none_is_empty():
    assert BlockPool(2).allocate(0) == []
