"""Faults in the model of a whole engine, and what must be as before when one has passed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from cgprof.accuracy.parity import ParityChecker
from cgprof.engine.worker import Engine
from cgprof.shapes import GraphKey

Part = Callable[[], object]
Fault = Callable[[Part, torch.Tensor], object]


def raises(part: Part, x: torch.Tensor) -> object:
    raise ValueError("planted")


def asks_the_host(part: Part, x: torch.Tensor) -> object:
    x.sum().item()
    return part()


def leaves_a_fork_open(part: Part, x: torch.Tensor) -> object:
    side = _strange_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul(2)
    return part()


def runs_elsewhere(part: Part, x: torch.Tensor) -> object:
    """On a stream that was never forked, or a thread that never entered the recording."""
    if x.is_cuda:
        with torch.cuda.stream(_strange_stream()):
            return part()
    results: list[object] = []

    def run() -> None:
        with torch.inference_mode():
            results.append(part())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


@contextmanager
def in_last_layer(
    engine: Engine, fault: Fault, *, microbatch: int | None = None, after_passes: int = 1
) -> Iterator[None]:
    """Puts a fault around the last attention of every pass, or of one microbatch's.

    `after_passes` 1 spares the warm-up of a capture.
    """
    attention = engine.model._layers[-1].attention
    forward, passes = attention.forward, 0

    def spoiled(x, context, *rest):
        nonlocal passes
        if microbatch is None or context.handoff is engine.microbatches.handoff(microbatch):
            passes += 1
            if passes > after_passes:
                return fault(lambda: forward(x, context, *rest), x)
        return forward(x, context, *rest)

    with _forward_of(attention, spoiled):
        yield


@contextmanager
def around_pass(engine: Engine, fault: Fault, *, microbatch: int | None = None) -> Iterator[None]:
    """Puts a fault around the whole second pass, or around that of one microbatch."""
    model = engine.model
    forward, passes = model.forward, 0

    def spoiled(context, out):
        nonlocal passes
        if microbatch is None or context.handoff is engine.microbatches.handoff(microbatch):
            passes += 1
            if passes > 1:
                fault(lambda: forward(context, out), out)
                return
        forward(context, out)

    with _forward_of(model, spoiled):
        yield


@contextmanager
def _forward_of(part: object, spoiled: Callable[..., object]) -> Iterator[None]:
    """Leaves no bound method on the part: that would keep an engine alive."""
    before = vars(part).get("forward")
    part.forward = spoiled
    try:
        yield
    finally:
        del part.forward
        if before is not None:
            part.forward = before


def _strange_stream() -> torch.cuda.Stream:
    """A stream that no engine has: torch hands out streams of one priority in turn."""
    return torch.cuda.Stream(priority=-1)


@contextmanager
def nothing_left_behind(engine: Engine) -> Iterator[None]:
    """Checks threads, garbage collector, current stream and the allocators' routing."""
    threads, collects = set(threading.enumerate()), gc.isenabled()
    yield
    assert set(threading.enumerate()) == threads
    assert gc.isenabled() is collects
    if engine.compute_stream is None:
        return
    assert torch.cuda.current_stream() == engine.compute_stream
    for stream in (engine.compute_stream, engine.comm_stream):
        with torch.cuda.stream(stream):
            assert not torch.cuda.is_current_stream_capturing()
            pool = engine.recorder.pool_by_stream()
            fresh = torch.empty(48 << 20, dtype=torch.uint8, device="cuda")
            assert engine.recorder.pool_by_stream() == pool
            fresh[: 1 << 16].copy_(torch.ones(1 << 16, dtype=torch.uint8).pin_memory())
            assert int(fresh[: 1 << 16].sum()) == 1 << 16


def check_replays(engine: Engine, *keys: GraphKey) -> None:
    """These keys, or all captured ones, replay what an eager pass computes, bit by bit."""
    checker = ParityChecker(engine)
    for key in keys or engine.graphs.keys:
        step = engine.live_step(key)
        replay, eager = checker.run(key, step), checker.run(key.as_eager(), step)
        assert bool(replay.hidden.isfinite().all()), key
        assert torch.equal(replay.hidden, eager.hidden), key
        assert replay.tokens.tolist() == eager.tokens.tolist(), key
