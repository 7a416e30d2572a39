"""Waits for the ranks of this host to end, and says which failed first and why."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cgprof.errors import ConfigError, RankError, RefusedByRankError
from cgprof.parallel.failure import Failure, read_failures

_LOOK_S = 0.05
_LOG_LINES = 3
_LOG_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Silent:
    """A rank that ended without a report; a negative status is the signal that killed it."""

    rank: int
    status: int


def wait_for_ranks(
    pids: Mapping[int, int], folder: Path, grace_s: float
) -> Failure | Silent | None:
    """Returns what failed first, None once all have ended well.

    Args:
        pids: Children of this process, by rank; they are left to be reaped by their owner.
        folder: Where they report.
        grace_s: How long a rank that has reported may put its files in order.
    """
    running = dict(pids)
    pause = threading.Event()
    while running:
        # Looked at before the reports are read: a rank that has ended has written its own.
        ended = _ended(running)
        first = first_of(ended, read_failures(folder))
        if isinstance(first, Failure):
            until = time.monotonic() + grace_s
            while time.monotonic() < until and not _ended({0: pids[first.reporter]}):
                pause.wait(_LOOK_S)
        if first is not None:
            return first
        for rank in ended:
            del running[rank]
        pause.wait(_LOOK_S)
    return None


def first_of(ended: Mapping[int, int], reports: Sequence[Failure]) -> Failure | Silent | None:
    """Returns the cause among what one look found.

    A rank that dies without a word makes its peers report that, so it goes before them. One that
    aborted does not: libraries abort a process whose peer is lost.

    Args:
        ended: Status by rank, as in `Silent`.
        reports: Earliest first.
    """
    reporters = {report.reporter for report in reports}
    silent = [
        Silent(rank, status)
        for rank, status in ended.items()
        if status != 0 and rank not in reporters
    ]
    aborted = [end for end in silent if end.status == -signal.SIGABRT]
    others = [end for end in silent if end.status != -signal.SIGABRT]
    for found in (others, reports, aborted):
        if found:
            return found[0]
    return None


def error_of(first: Failure | Silent, logs: Mapping[int, str]) -> RankError:
    """Returns the error that the user sees.

    Args:
        first: What failed.
        logs: The file that holds each rank's stderr, empty for a rank that shares the terminal.
    """
    if isinstance(first, Failure):
        kind = RefusedByRankError if first.exit_code == ConfigError.exit_code else RankError
        where = f"; its traceback is in {first.traceback}" if first.traceback else ""
        return kind(first.rank, first.message + where)
    if first.status < 0:
        problem = f"was killed by {signal.Signals(-first.status).name}"
    else:
        problem = f"ended with exit code {first.status} and no error"
    log = logs[first.rank]
    lines = _last_lines(Path(log)) if log else []
    if lines:
        problem += f"; the end of its log {log}: {' | '.join(lines)}"
    return RankError(first.rank, problem)


def _ended(pids: Mapping[int, int]) -> dict[int, int]:
    """Returns the status of those that have ended, and does not reap them."""
    found = {}
    for rank, pid in pids.items():
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if end is not None:
            found[rank] = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
    return found


def _last_lines(path: Path) -> list[str]:
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - _LOG_BYTES))
        text = log.read().decode(errors="replace")
    return [line.strip() for line in text.splitlines() if line.strip()][-_LOG_LINES:]
