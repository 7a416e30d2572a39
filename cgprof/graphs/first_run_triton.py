"""Refuses the first run of a Triton kernel while a graph is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from triton import knobs

from cgprof.errors import RecordingError


@contextmanager
def first_runs_refused() -> Iterator[None]:
    """Makes a kernel that would be compiled or loaded inside raise RecordingError, in any thread.

    A recording that compiles takes seconds or not by the state of Triton's cache, and shows that
    the warm-up took another path.
    """

    def refuse(*, fn: knobs.JitFunctionInfo, **_: object) -> bool:
        raise RecordingError(
            f"first run of kernel {fn.name} inside capture: the warm-up did not run it; "
            "choose kernels by the key, never by whether a capture is on"
        )

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = refuse
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = before
