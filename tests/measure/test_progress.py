import threading

import pytest

from cgprof.measure.progress import Progress, eta_text


class Lines:
    """Collects lines and lets a test wait for their number."""

    def __init__(self, error=None):
        self.all = []
        self._error = error
        self._changed = threading.Condition()

    def __call__(self, line):
        with self._changed:
            self.all.append(line)
            self._changed.notify_all()
        if self._error is not None and len(self.all) > 1:
            raise self._error

    def wait_for(self, count):
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.all) >= count, timeout=30)


@pytest.mark.parametrize(
    ("done", "count", "elapsed_s", "text"),
    [
        (0, 8, 99.0, ""),
        (2, 8, 1.0, ", about 3 s left"),
        (2, 8, 0.2, ""),
        (8, 8, 40.0, ""),
        (33, 67, 60.0, ", about 62 s left"),
    ],
)
def test_eta_is_what_the_steps_so_far_took_for_the_rest(done, count, elapsed_s, text):
    assert eta_text(done, count, elapsed_s) == text


def test_steps_are_counted_and_say_what_is_left():
    lines, now = Lines(), [0.0]
    progress = Progress(lines, read_s=lambda: now[0])
    progress.say("building tiny")
    progress.stage("capture", 3)
    for label in ("a", "b", "c"):
        progress.step(label)
        now[0] += 10
    assert lines.all == [
        "building tiny",
        "capture 1/3 a",
        "capture 2/3 b, about 20 s left",
        "capture 3/3 c, about 10 s left",
    ]


def test_long_step_is_said_again_until_the_end_and_the_thread_is_gone():
    lines, threads = Lines(), set(threading.enumerate())
    with Progress(lines, every_s=0.01) as progress:
        progress.stage("capture", 2)
        progress.step("a")
        lines.wait_for(3)
    said = len(lines.all)
    assert lines.all[1:] == ["capture 1/2 a, 0 s so far"] * (said - 1)
    assert set(threading.enumerate()) == threads


def test_thread_that_cannot_print_ends_quietly():
    lines = Lines(BrokenPipeError())
    with Progress(lines, every_s=0.01) as progress:
        progress.say("building tiny")
        lines.wait_for(2)
        assert lines.all == ["building tiny", "building tiny, 0 s so far"]
        progress._thread.join(timeout=30)
        assert not progress._thread.is_alive()


def test_nothing_is_ever_unsaid_for_five_seconds():
    now, said = [0.0], []
    progress = Progress(said.append, read_s=lambda: now[0])
    assert progress._every_s < 5
