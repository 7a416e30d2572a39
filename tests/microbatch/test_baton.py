"""The baton by itself: one thread at a time, in ring order, and never a wait without an end."""

import threading
from contextlib import contextmanager

import pytest

from cgprof.errors import MicrobatchError
from cgprof.microbatch.baton import Baton, PeerFailed


@contextmanager
def on_threads(baton, parts):
    """Runs `parts[i](i)` in each step on a thread of its own, until the block ends."""

    def serve(index):
        while baton.wait_turn(index):
            try:
                baton.check()
                parts[index](index)
            except (PeerFailed, ArithmeticError) as error:
                baton.fail(index, error)
            else:
                baton.finish(index)

    threads = [threading.Thread(target=serve, args=(i,), daemon=True) for i in range(len(parts))]
    for thread in threads:
        thread.start()
    yield
    baton.stop()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def run_step(baton):
    baton.start()
    return baton.join()


@pytest.mark.parametrize("count", [2, 3, 5])
def test_turns_go_round_the_ring_and_only_one_thread_runs(count):
    baton = Baton(count, 10)
    order, running = [], []

    def part(index):
        for _ in range(3):
            running.append(index)
            assert running == [index]
            order.append(index)
            running.remove(index)
            baton.hand_over(index)

    with on_threads(baton, [part] * count):
        for _ in range(2):
            order.clear()
            assert run_step(baton) is None
            assert order == list(range(count)) * 3


def test_ring_goes_on_without_those_that_finished():
    baton = Baton(3, 10)
    order = []

    def part(handovers):
        def run(index):
            for _ in range(handovers):
                order.append(index)
                baton.hand_over(index)

        return run

    with on_threads(baton, [part(1), part(4), part(2)]):
        assert run_step(baton) is None
    assert order == [0, 1, 2, 1, 2, 1, 1]


def test_first_error_is_kept_and_peers_unwind_one_at_a_time():
    baton = Baton(3, 10)
    unwound, inside = [], []

    def peer(index):
        try:
            baton.hand_over(index)
        finally:
            inside.append(index)
            assert inside == [index]
            unwound.append(index)
            inside.remove(index)

    def divides(index):
        baton.hand_over(index)
        raise ZeroDivisionError(f"in {index}")

    def overflows(index):
        try:
            baton.hand_over(index)
        except PeerFailed:
            raise OverflowError("later") from None

    with on_threads(baton, [peer, divides, overflows]):
        failure = run_step(baton)
        assert failure is not None
        assert failure.index == 1
        assert isinstance(failure.error, ZeroDivisionError)
        assert unwound == [0]


def test_failure_is_sticky_for_a_peer_that_goes_on():
    baton = Baton(2, 10)
    refusals = []

    def stubborn(index):
        for _ in range(3):
            try:
                baton.hand_over(index)
            except PeerFailed:
                refusals.append(index)

    def divides(index):
        raise ZeroDivisionError

    with on_threads(baton, [stubborn, divides]):
        assert run_step(baton).index == 1
    assert refusals == [0, 0, 0]


@pytest.mark.parametrize("before", [0, 1])
def test_turn_that_never_ends_loses_its_thread_and_frees_the_others(before):
    baton = Baton(3, 0.5)
    wake, unwound = threading.Event(), []

    def hangs(index):
        for _ in range(before):
            baton.hand_over(index)
        wake.wait(30)

    def peer(index):
        try:
            baton.hand_over(index)
            baton.hand_over(index)
        except PeerFailed:
            unwound.append(index)
            raise

    with on_threads(baton, [peer, hangs, peer]):
        failure = run_step(baton)
        assert failure.index == 1
        assert isinstance(failure.error, MicrobatchError)
        assert "kept its turn for more than 0.5 s" in str(failure.error)
        assert baton.lost == 1
        wake.set()
    # Without a handover microbatch 2 never had a turn, so it had nothing to unwind.
    assert sorted(unwound) == ([0] if before == 0 else [0, 2])


def test_turns_that_move_on_may_take_longer_than_the_timeout_in_all():
    baton = Baton(2, 0.5)
    pause = threading.Event()

    def part(index):
        for _ in range(6):
            pause.wait(0.06)
            baton.hand_over(index)

    with on_threads(baton, [part, part]):
        assert run_step(baton) is None


def test_cancelled_step_unwinds_and_the_next_one_runs():
    baton = Baton(2, 10)
    started, go_on, endless = threading.Event(), threading.Event(), [True]

    def part(index):
        started.set()
        go_on.wait(10)
        while endless[0]:
            baton.hand_over(index)

    with on_threads(baton, [part, part]):
        baton.start()
        assert started.wait(10)
        baton.cancel()
        go_on.set()
        failure = baton.join()
        assert failure.index == 0
        assert "aborted" in str(failure.error)
        assert not baton.running
        endless[0] = False
        assert run_step(baton) is None
