"""Starts one process a rank on this host; the first that fails ends all, and its error is told."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cgprof.errors import ConfigError, DeviceError, RankError
from cgprof.parallel.ended import error_of, wait_for_ranks
from cgprof.parallel.failure import FOLDER, read_result
from cgprof.parallel.grid import Rank
from cgprof.parallel.launched import LAUNCHER

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it does export it

_GRACE_S = 5  # from the first signal to SIGKILL
_ADDRESS = "127.0.0.1"
# Those that torch's elastic takes for itself.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def find_rank(environ: Mapping[str, str]) -> Rank | None:
    """Returns which rank this process already is: of torchrun, of `launch`, or of a SLURM step.

    A SLURM step of one task is none, and neither is a batch script, which has SLURM_PROCID too.

    Raises:
        ConfigError: The variables name a rank, but not wholly.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if "RANK" not in environ:
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
        if environ.get(names[1], "1") == "1":
            return None
    rank, size, local_rank = (_number(environ, name) for name in names)
    for name, found in ((names[0], rank), (names[2], local_rank)):
        if found >= size:
            raise ConfigError("environment", f"{name} is {found}, but {names[1]} is {size}")
    return Rank(rank, size, local_rank)


def launch(count: int, argv: Sequence[str], *, command: Sequence[str] | None = None) -> int:
    """Runs `python -m cgprof ARGV` once a rank, and waits until all have ended.

    Rank 0 has this process's stdout and stderr; those of the others go to files. A signal that
    ends this process ends the ranks before it has its usual effect here.

    Args:
        count: How many ranks.
        argv: The arguments of each.
        command: What to run instead of `python -m cgprof`.

    Returns:
        The exit code that rank 0 gave to `report_result`.

    Raises:
        RankError: The first rank that failed, and why; exit code 2 if it refused its input.
        DeviceError: No port can be opened for the ranks to meet.
        OSError: A process cannot be started.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    try:
        with _folder() as folder, _signal_handlers_kept(), _quiet_elastic():
            error = _run(count, [*(command or (sys.executable, "-m", "cgprof")), *argv], folder)
            if error is not None:
                raise error
            return read_result(folder)
    except SignalException as caught:
        signal.raise_signal(caught.sigval)
        raise KeyboardInterrupt from caught


@contextmanager
def _folder() -> Iterator[Path]:
    """What the ranks write; it stays only for an error that names it."""
    folder, stays = Path(tempfile.mkdtemp(prefix="cgprof-ranks-")), False
    try:
        yield folder
    except RankError as error:
        stays = str(folder) in error.problem
        raise
    finally:
        if not stays:
            shutil.rmtree(folder, ignore_errors=True)


def _run(count: int, command: Sequence[str], folder: Path) -> RankError | None:
    # Not through `elastic_launch`: after a failure that waits 30 s for a rank that stays.
    from torch.distributed.elastic.multiprocessing import (
        DefaultLogsSpecs,
        SignalException,
        Std,
        start_processes,
    )

    store = _meeting_place()
    redirects = dict.fromkeys(range(1, count), Std.ALL)
    ignored = [taken for taken in _SIGNALS if signal.getsignal(taken) is signal.SIG_IGN]
    ranks = start_processes(
        name="rank",
        entrypoint=command[0],
        args=dict.fromkeys(range(count), tuple(command[1:])),
        envs=_environments(count, store.port, folder),
        logs_specs=DefaultLogsSpecs(log_dir=str(folder), redirects=redirects),
    )
    last_word = signal.SIGTERM
    try:
        _ignore(ignored)  # as nohup wants it
        first = wait_for_ranks(ranks.pids(), folder, _GRACE_S)
    except SignalException as caught:
        last_word = signal.SIGINT if caught.sigval == signal.SIGINT else signal.SIGTERM
        raise
    finally:
        _ignore(_SIGNALS)
        ranks.close(last_word, _GRACE_S)
    return None if first is None else error_of(first, ranks.stderrs)


def _meeting_place() -> TCPStore:
    """Where the ranks meet; the kernel picks the port as it is bound, so that it is free."""
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # it does

    try:
        return TCPStore(_ADDRESS, 0, is_master=True, wait_for_workers=False)
    except DistError as error:
        reason = str(error).splitlines()[0]
        raise DeviceError(f"the ranks have no place to meet on {_ADDRESS}: {reason}") from error


def _environments(count: int, port: int, folder: Path) -> dict[int, dict[str, str]]:
    shared = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": _ADDRESS,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        FOLDER: str(folder),
        LAUNCHER: str(os.getpid()),
    }
    if "OMP_NUM_THREADS" not in os.environ:
        shared["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // count))
    return {rank: {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)}


def _number(environ: Mapping[str, str], name: str) -> int:
    found = environ.get(name)
    if found is None:
        raise ConfigError("environment", f"{name} is not set, though others name a rank")
    if not (found.isascii() and found.isdigit()):
        raise ConfigError("environment", f"{name} is {found!r}, not a number")
    return int(found)


def _ignore(signals: Sequence[signal.Signals]) -> None:
    if threading.current_thread() is threading.main_thread():
        for taken in signals:
            signal.signal(taken, signal.SIG_IGN)


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    before = {taken: signal.getsignal(taken) for taken in _SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for taken, handler in before.items():
                signal.signal(taken, signal.SIG_DFL if handler is None else handler)


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Keeps elastic's account of signals, and Python's of the logs it leaves open, to itself."""
    logger = logging.getLogger("torch.distributed.elastic")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore", category=ResourceWarning):
            yield
    finally:
        logger.setLevel(before)
