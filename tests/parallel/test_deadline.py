import ctypes
import subprocess
import sys
import threading

import pytest

from cgprof.parallel.deadline import Deadline
from tests.support.children import environment

LONG_S = 60.0


@pytest.fixture
def expiry():
    return Expiry()


class Expiry:
    """What a deadline told, and a way to wait for it."""

    def __init__(self):
        self.told = []
        self._came = threading.Event()

    def __call__(self, what):
        self.told.append(what)
        self._came.set()

    def wait(self, seconds=10.0):
        return self._came.wait(seconds)


@pytest.fixture
def start(expiry):
    started = []

    def start(timeout_s):
        started.append(Deadline(timeout_s, expiry))
        return started[-1]

    yield start
    for deadline in started:
        deadline.close()


class Device:
    """Something that is done when told, and knows whether it was asked."""

    def __init__(self, done=False):
        self.is_done = done
        self._asked = threading.Event()

    def __call__(self):
        self._asked.set()
        return self.is_done

    def was_asked(self, seconds):
        self._asked.clear()
        return self._asked.wait(seconds)


def test_what_is_not_done_in_time_expires_once(start, expiry):
    start(0.2).watch(Device(), "replay of full 64 does not finish")
    assert expiry.wait()
    assert not threading.Event().wait(0.3)
    assert expiry.told == ["replay of full 64 does not finish (waited 0.2 s)"]


def test_what_is_done_does_not_expire_and_is_not_asked_again(start, expiry):
    device = Device(done=True)
    start(0.2).watch(device, "a replay")
    assert device.was_asked(5)
    threading.Event().wait(0.1)
    assert not device.was_asked(0.4)
    assert expiry.told == []


def test_done_but_late_is_done(start, expiry):
    """A look may come late on a busy machine; only what is still not done is a fault."""
    device = Device()
    deadline = start(LONG_S)
    deadline.watch(device, "a replay")
    assert device.was_asked(5)
    device.is_done = True
    assert device.was_asked(5)
    assert not device.was_asked(0.3)
    assert expiry.told == []


def test_the_next_watch_takes_the_place_of_the_last(start, expiry):
    deadline = start(0.2)
    deadline.watch(Device(), "first")
    deadline.watch(Device(), "second")
    assert expiry.wait()
    assert expiry.told == ["second (waited 0.2 s)"]


def test_a_watch_after_a_done_one_expires(start, expiry):
    deadline = start(0.2)
    first = Device(done=True)
    deadline.watch(first, "first")
    assert first.was_asked(5)
    deadline.watch(Device(), "second")
    assert expiry.wait()
    assert expiry.told == ["second (waited 0.2 s)"]


def test_progress_gives_the_whole_time_again(start, expiry):
    deadline = start(1.0)
    deadline.watch(Device(), "no step finished; rank 1 has no KV blocks")
    for _ in range(15):
        threading.Event().wait(0.1)
        deadline.renew()
    assert expiry.told == []
    assert expiry.wait()
    assert expiry.told == ["no step finished; rank 1 has no KV blocks (waited 1 s)"]


def test_a_device_error_is_left_to_the_thread_that_launched(start, expiry):
    asked = threading.Event()

    def broken():
        asked.set()
        raise RuntimeError("an illegal memory access was encountered")

    deadline = start(0.2)
    deadline.watch(broken, "first")
    assert asked.wait(5)
    assert not expiry.wait(0.4)
    deadline.watch(Device(), "second")
    assert expiry.wait()
    assert expiry.told == ["second (waited 0.2 s)"]


def test_inside_an_extended_section_nothing_is_asked_or_expires(start, expiry):
    deadline = start(0.2)
    device = Device()
    with deadline.extended(LONG_S):
        deadline.watch(device, "a replay")
        assert not device.was_asked(0.5)
        assert expiry.told == []
    assert device.was_asked(5)
    assert expiry.wait()


def test_no_question_is_open_when_an_extended_section_begins(start):
    """A capture begins there; a query that is still on its way would spoil it."""
    asked, answer = threading.Event(), threading.Event()
    open_questions = []

    def slow():
        open_questions.append("open")
        asked.set()
        answer.wait(10)
        open_questions.clear()
        return True

    deadline = start(LONG_S)
    deadline.watch(slow, "a replay")
    assert asked.wait(5)
    threading.Timer(0.2, answer.set).start()
    with deadline.extended(LONG_S):
        assert open_questions == []


def test_an_extended_section_has_a_bound_of_its_own(start, expiry):
    with start(LONG_S).extended(0.2, "capture of full 64 does not end"):
        assert expiry.wait()
    assert expiry.told == ["capture of full 64 does not end (waited 0.2 s)"]


def test_an_outer_section_stands_still_in_an_inner_one(start, expiry):
    deadline = start(0.5)
    with deadline.extended(0.4, "outer"):
        with deadline.extended(LONG_S, "inner"):
            assert not expiry.wait(0.8)
        assert expiry.told == []
        assert expiry.wait()
    assert expiry.told == ["outer (waited 0.4 s)"]


def test_an_error_leaves_the_extended_section(start, expiry):
    deadline = start(0.2)
    with pytest.raises(ValueError, match="compile"), deadline.extended(LONG_S):
        raise ValueError("compile")
    deadline.watch(Device(), "a replay")
    assert expiry.wait()


def test_it_works_while_the_main_thread_is_in_a_c_call(start, expiry):
    start(0.2).watch(Device(), "a replay")
    ctypes.CDLL(None).usleep(900_000)
    assert expiry.told == ["a replay (waited 0.2 s)"]


def test_a_closed_deadline_says_nothing(expiry):
    deadline = Deadline(0.2, expiry)
    deadline.watch(Device(), "a replay")
    deadline.close()
    assert not expiry.wait(0.4)


def test_without_a_launcher_the_rank_says_it_itself():
    script = """
import signal
from cgprof.errors import RankError
from cgprof.parallel.deadline import Deadline, end_rank
stuck = lambda what: RankError(2, f"did not answer; on rank 3 {what}")
Deadline(0.1, end_rank(3, stuck)).watch(lambda: False, "replay of full 64")
signal.pause()
"""
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 3
    told = "did not answer; on rank 3 replay of full 64 (waited 0.1 s)"
    assert ended.stderr == f"error: rank 2: {told}\n"
