"""What a rank does before all else when a launcher started it: it does not outlive its launcher."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from types import TracebackType

from cgprof.parallel.failure import report_error

LAUNCHER = "CGPROF_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1  # Source: prctl(2), linux/prctl.h


def follow_launcher() -> None:
    """Ties this process to its launcher; without one, does nothing.

    The kernel kills it when the launcher is gone, and an error that nothing catches becomes the
    launcher's to tell. Call it before Typer is imported, which keeps the hook that it then finds.
    """
    launcher = os.environ.get(LAUNCHER)
    if launcher is None:
        return
    follow(int(launcher))
    sys.excepthook = _report_bug


def follow(parent: int) -> None:
    """Has the kernel kill this process as soon as `parent`, which started it, is gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it went away before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


def _report_bug(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if not (isinstance(error, Exception) and report_error(error)):
        sys.__excepthook__(kind, error, trace)
