"""How a process ends that used a CUDA device."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_BINDINGS = "cuda.bindings.runtime"


@contextmanager
def ending() -> Iterator[None]:
    """Has a process that loaded CUDA's bindings end after Python's exit handlers, and no others.

    Those let go of the device in C's exit handlers, where the driver calls back into a profiler
    that is torn down by then: a process whose work is done would die of SIGABRT. Whatever raises
    other than SystemExit ends the process as ever. Handlers of Python that were registered before
    this is entered do not run; enter it first.
    """
    code: int | None = None

    def end() -> None:
        if code is not None and _BINDINGS in sys.modules:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):  # its reader went away, or it is closed
                    stream.flush()
            ctypes.CDLL(None).fflush(None)  # what libraries printed
            os._exit(code)

    atexit.register(end)  # the first to be registered is the last to run
    try:
        yield
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else None
        raise
