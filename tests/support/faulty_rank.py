"""`python -m tests.support.faulty_rank FAULT@RANK ARGS`: cgprof, with a fault on one rank or none.

Started alone it launches itself, once a rank; the folder FAULTY_PIDS gets the process ids.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cgprof.parallel.launched import follow_launcher

PIDS = "FAULTY_PIDS"  # the variable that names the folder of process ids
Act = Callable[[], object]
_THIRD = 2


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _sleep() -> None:
    time.sleep(100)


def _raise() -> None:
    raise ValueError("planted")


def _raise_and_hang() -> None:
    """Raises, and never ends what has to be closed then, as if that waited for other ranks."""
    from cgprof.engine.worker import Engine

    Engine.close = lambda self: _sleep()
    _raise()


def _exhaust() -> None:
    raise MemoryError


def _in_capture(act: Act) -> None:
    from cgprof.engine.worker import Engine

    capture = Engine.capture

    def faulty(self, key, mark):
        if key == self.plan.keys[_THIRD]:
            act()
        return capture(self, key, mark)

    Engine.capture = faulty


def _in_recording(act: Act, microbatch: int | None = None) -> None:
    from cgprof.engine.worker import Engine
    from tests.support.planted import in_last_layer

    capture = Engine.capture

    def faulty(self, key, mark):
        if key != self.plan.keys[_THIRD]:
            return capture(self, key, mark)
        with in_last_layer(self, lambda part, x: act(), microbatch=microbatch):
            return capture(self, key, mark)

    Engine.capture = faulty


def _in_microbatch(act: Act) -> None:
    _in_recording(act, 1)


def _in_replay(act: Act) -> None:
    from cgprof.graphs.manager import GraphManager

    replay, replays = GraphManager.replay, []

    def faulty(self, graph):
        replays.append(graph)
        if len(replays) > 20:
            act()
        return replay(self, graph)

    GraphManager.replay = faulty


def _in_forward(act: Act) -> None:
    """In an eager pass of a served step."""
    from cgprof import job
    from cgprof.models.decoder import Decoder

    forward, serve = Decoder.forward, job.serve

    def faulty(self, context, out):
        act()
        return forward(self, context, out)

    def serving(*args):
        Decoder.forward = faulty
        return serve(*args)

    job.serve = serving


def _in_vote(act: Act) -> None:
    """In a vote of a served step."""
    from cgprof import job
    from cgprof.engine.peers import Peers

    start, serve = Peers.start, job.serve

    def faulty(self, vote):
        act()
        return start(self, vote)

    def serving(*args):
        Peers.start = faulty
        return serve(*args)

    job.serve = serving


def _in_parity(act: Act) -> None:
    from cgprof.accuracy.parity import ParityChecker

    check, checks = ParityChecker.check, []

    def faulty(self, key):
        checks.append(key)
        if len(checks) > 1:
            act()
        return check(self, key)

    ParityChecker.check = faulty


def _in_plan(act: Act) -> None:
    """One key less than the others have; `act` does not matter."""
    from cgprof import run
    from cgprof.graphs.plan import CapturePlan

    resolve = run.resolve_plan

    def faulty(*asked):
        policy, plan = resolve(*asked)
        return policy, CapturePlan(
            keys=plan.keys[:-1], skipped=plan.skipped, uncovered_batches=plan.uncovered_batches
        )

    run.resolve_plan = faulty


def _in_instantiation(act: Act) -> None:
    """When all exchanges of a capture are over."""
    from cgprof.engine.worker import Engine

    capture = Engine.capture

    def faulty(self, key, mark):
        def marked(phase):
            mark(phase)
            if key == self.plan.keys[_THIRD] and phase == "instantiated":
                act()

        return capture(self, key, marked)

    Engine.capture = faulty


_ACTS = {
    "kill": _kill,
    "stop": _stop,
    "sleep": _sleep,
    "raise": _raise,
    "hang": _raise_and_hang,
    "exhaust": _exhaust,
}
_PLACES: dict[str, Callable[[Act], None]] = {
    "capture": _in_capture,
    "recording": _in_recording,
    "microbatch": _in_microbatch,
    "replay": _in_replay,
    "forward": _in_forward,
    "vote": _in_vote,
    "parity": _in_parity,
    "plan": _in_plan,
    "instantiation": _in_instantiation,
}


def _launch_this_module(fault: str) -> None:
    from cgprof.parallel import launch as module

    launch = module.launch
    command = [sys.executable, "-m", "tests.support.faulty_rank", fault]
    module.launch = lambda count, argv: launch(count, argv, command=command)


def main() -> None:
    follow_launcher()
    fault = sys.argv.pop(1)
    what, rank = fault.split("@")
    if "RANK" not in os.environ:
        _launch_this_module(fault)
    else:
        own = os.environ["RANK"]
        if PIDS in os.environ:
            (Path(os.environ[PIDS]) / f"{own}.pid").write_text(str(os.getpid()))
        if own == rank:
            act, place = what.split("-in-")
            _PLACES[place](_ACTS[act])
    from cgprof.cli.app import main as cgprof

    cgprof()


if __name__ == "__main__":
    main()
