import errno
import os
import signal
import struct
import time
from datetime import timedelta

import pytest

from cgprof.parallel.board import Board
from tests.support.ranks import run_ranks

WIDTH = 3
SOON, LONG = timedelta(seconds=0.05), timedelta(seconds=20)
LIMIT_S = 20.0


def joined(ranks):
    """A board of all ranks, besides the one that their rounds go over."""
    size = {"size": ranks.size, "width": WIDTH}
    board = Board.make(rank=0, **size) if ranks.rank == 0 else None
    place = ranks.gather_objects(board and board.place)[0]
    board = board or Board.open(place, rank=ranks.rank, **size)
    ranks.barrier()
    return board


@pytest.fixture
def pair():
    """Two ranks' boards in one process, which has one lock for both: each sees the other as gone
    as soon as it has waited some ms for a row."""
    first = Board.make(rank=0, size=2, width=WIDTH)
    second = Board.open(first.place, rank=1, size=2, width=WIDTH)
    yield first, second
    first.close()
    second.close()


def why(work):
    with pytest.raises(RuntimeError) as caught:
        work()
    return str(caught.value)


def descriptors():
    return sorted(os.listdir("/proc/self/fd"))


def many_rounds(ranks, count):
    board = joined(ranks)
    expected = received = 0
    for number in range(1, count + 1):
        if number % ranks.size == ranks.rank and number % 7 == 0:
            time.sleep(0.001)
        board.send((number, ranks.rank * number, -(2**62) + ranks.rank), LIMIT_S)
        board.wait(LONG)
        rows = [(number, rank * number, -(2**62) + rank) for rank in range(ranks.size)]
        expected += 1
        received += board.rows() == rows
    board.close()
    return expected, received


@pytest.mark.ranks(4)
@pytest.mark.parametrize("size", [2, 4])
def test_all_rows_of_many_rounds_arrive(size):
    assert run_ranks(size, many_rounds, 500) == [(500, 500)] * size


def test_slow_rank_still_reads_a_row_after_the_fast_one_has_sent_the_next(pair):
    fast, slow = pair
    fast.send((1, 0, 1), LIMIT_S)
    for number in range(1, 5):
        slow.send((number, 1, 0), LIMIT_S)
        fast.wait(LONG)
        fast.send((number + 1, 0, number + 1), LIMIT_S)
        slow.wait(LONG)
        assert slow.rows() == [(number, 0, number), (number, 1, 0)]


@pytest.mark.parametrize("spoilt", [*range(0, 8 * WIDTH, 5), 8 * WIDTH, 8 * WIDTH + 3])
def test_row_that_does_not_fit_its_checksum_is_not_there(pair, spoilt):
    reader, writer = pair
    row = (1, 4, 5)
    writer.send(row, LIMIT_S)
    _, descriptor, _, _ = reader.place
    memory = os.pread(descriptor, 4096, 0)
    at = memory.index(struct.pack("<3q", *row)) + spoilt
    os.pwrite(descriptor, bytes([memory[at] ^ 64]), at)
    reader.send((1, 0, 0), LIMIT_S)
    assert why(lambda: reader.wait(SOON)) == "rank 1 is gone"


def test_spoilt_row_is_read_once_it_is_whole(pair):
    reader, writer = pair
    writer.send((1, 4, 5), LIMIT_S)
    _, descriptor, _, _ = reader.place
    at = os.pread(descriptor, 4096, 0).index(struct.pack("<3q", 1, 4, 5)) + 8
    os.pwrite(descriptor, b"\7", at)
    reader.send((1, 0, 0), LIMIT_S)
    assert not reader.is_completed()
    os.pwrite(descriptor, b"\4", at)
    reader.wait(LONG)
    assert reader.is_completed()
    assert reader.rows() == [(1, 0, 0), (1, 4, 5)]


def be_late(ranks):
    """Rank 1 waits for the first wait of rank 0 to be over, and stays away from the next round."""
    board = joined(ranks)
    if ranks.rank == 1:
        ranks.barrier()
        board.send((1, 1, 1), LIMIT_S)
        board.wait(LONG)
        ranks.barrier()
        return board.rows()
    board.send((1, 0, 0), LIMIT_S)
    told = [why(lambda: board.wait(SOON)), board.is_completed()]
    ranks.barrier()
    board.wait(LONG)
    told.append(board.rows())
    board.send((2, 0, 0), 0.1)
    told += [why(lambda: board.wait(LONG)), board.is_completed()]
    told += [why(lambda: board.wait(LONG)), why(lambda: board.send((3, 0, 0), LIMIT_S))]
    ranks.barrier()
    return told


@pytest.mark.ranks(2)
def test_wait_ends_at_its_own_time_and_for_good_at_the_round_s():
    rows = [(1, 0, 0), (1, 1, 1)]
    first = ["waited 0.05 s", False, rows, "timed out", True, "timed out", "timed out"]
    assert run_ranks(2, be_late) == [first, rows]


def die_with_a_child(ranks):
    """Rank 1 is killed; its child, which has all of its descriptors, lives on."""
    board = joined(ranks)
    child = 0
    if ranks.rank == 1:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    child = ranks.gather_objects(child)[1]
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    board.send((1, 0, 0), 10.0)
    try:
        return why(lambda: board.wait(LONG))
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.ranks(2)
def test_killed_rank_is_gone_though_its_child_lives_on():
    assert run_ranks(2, die_with_a_child, may_die=[1])[0] == "rank 1 is gone"


def end_after_the_last_row(ranks):
    board = joined(ranks)
    process = ranks.gather_objects(os.getpid())[1]
    board.send((1, ranks.rank, 0), LIMIT_S)
    if ranks.rank == 1:
        os._exit(0)
    while os.path.exists(f"/proc/{process}/exe"):  # a zombie has none
        time.sleep(0.01)
    board.wait(LONG)
    return board.rows()


@pytest.mark.ranks(2)
def test_row_of_a_rank_that_ended_after_it_is_read():
    assert run_ranks(2, end_after_the_last_row, may_die=[1])[0] == [(1, 0, 0), (1, 1, 0)]


def leave(ranks):
    """Rank 3 gives up, rank 1 is silent; rank 2 sends only when it could know."""
    board = joined(ranks)
    if ranks.rank == 3:
        board.leave()
    if ranks.rank in (1, 3):
        ranks.barrier()
        return None
    board.send((1, 0, 0), LIMIT_S)
    told = why(lambda: board.wait(LONG))
    ranks.barrier()
    return told


@pytest.mark.ranks(4)
def test_rank_that_gave_up_is_heard_before_a_silent_one_is_there():
    assert run_ranks(4, leave) == ["rank 3 gave up", None, "rank 3 gave up", None]


def test_rank_that_gave_up_sends_nothing_more(pair):
    pair[1].leave()
    assert why(lambda: pair[1].send((1, 0, 0), LIMIT_S)) == "gave up before"
    pair[0].send((2, 0, 0), LIMIT_S)
    assert why(lambda: pair[0].wait(LONG)) == "rank 1 gave up"


@pytest.mark.parametrize("part", range(4))
def test_memory_at_another_place_is_not_opened(pair, part):
    place = pair[0].place
    place[part] += 1000 if part else 2**22
    before = descriptors()
    with pytest.raises(OSError, match=os.strerror(errno.ENOENT)):
        Board.open(place, rank=1, size=2, width=WIDTH)
    assert descriptors() == before


def test_closed_board_leaves_nothing_behind():
    before = descriptors(), sorted(os.listdir("/dev/shm"))
    board = Board.make(rank=0, size=4, width=WIDTH)
    board.close()
    assert (descriptors(), sorted(os.listdir("/dev/shm"))) == before
    assert why(lambda: board.send((1, 0, 0), LIMIT_S)) == "closed"
