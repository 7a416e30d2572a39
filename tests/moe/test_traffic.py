import pytest

from cgprof.config.schema import All2AllBackend
from cgprof.moe.traffic import RowFormat, bytes_moved, bytes_needed

A2A = All2AllBackend.ALL_TO_ALL
AG = All2AllBackend.ALLGATHER_REDUCESCATTER
QWEN3 = RowFormat(hidden_size=2048, itemsize=2, top_k=8)


def test_block_has_room_for_the_routing_behind_its_rows():
    # 64 bytes of routing a row: 64 rows of it fill one hidden state of 4096 bytes.
    assert [QWEN3.block_rows(capacity) for capacity in (1, 64, 65, 256)] == [2, 65, 67, 260]
    narrow = RowFormat(hidden_size=8, itemsize=2, top_k=6)
    assert narrow.block_rows(3) == 3 + 9


@pytest.mark.parametrize(
    ("backend", "capacity", "rows"),
    [(AG, None, 260), (AG, 64, 260), (A2A, None, 260), (A2A, 512, 260), (A2A, 64, 65)],
)
def test_bytes_moved_follow_from_shapes(backend, capacity, rows):
    assert bytes_moved(backend, 256, 4, QWEN3, capacity) == 2 * 3 * rows * 4096
    assert bytes_moved(backend, 256, 1, QWEN3, capacity) == 0


@pytest.mark.parametrize("backend", [All2AllBackend.EXACT, All2AllBackend.SYMMETRIC_MEMORY])
def test_exchanges_that_send_by_routing_have_no_bytes_by_shape(backend):
    assert bytes_moved(backend, 256, 4, QWEN3) is None


def test_bytes_needed_count_a_row_there_and_a_sum_back_for_each_other_rank():
    starts = (0, 2, 4, 8)
    one_trip = 4096 + 64 + 4096
    assert bytes_needed([[0, 1]], 0, starts, QWEN3) == 0  # at home
    assert bytes_needed([[2, 3]], 0, starts, QWEN3) == one_trip  # one row serves both
    assert bytes_needed([[0, 2, 7]], 0, starts, QWEN3) == 2 * one_trip
    assert bytes_needed([[0, 2, 7]], 2, starts, QWEN3) == 2 * one_trip
    assert bytes_needed([[-1, -1], [1, 4]], 1, starts, QWEN3) == 2 * one_trip


def test_no_exchange_moves_less_than_is_needed():
    ids = [[(3 * token + k) % 8 for k in range(8)] for token in range(40)]
    needed = bytes_needed(ids, 1, (0, 2, 4, 6, 8), QWEN3)
    assert needed == 40 * 3 * (4096 + 64 + 4096)
    for backend in (A2A, AG):
        moved = bytes_moved(backend, 40, 4, QWEN3)
        assert moved is not None
        assert moved >= needed
