"""One writer a run folder: a lock that the system itself frees when its process ends.

A process that is killed leaves the lock's file behind and not the lock; the file says who it was.
"""

from __future__ import annotations

import fcntl
import os
import platform
import weakref
from datetime import UTC, datetime
from pathlib import Path

from cgprof.errors import ConfigError

LOCK = "run.lock"
_MOST_BYTES = 1024


class FolderLock:
    """Held from its making until `release`, or until it is forgotten or its process ends."""

    def __init__(self, folder: Path, flag: str) -> None:
        """Takes the lock of a folder that exists; `flag` begins the error.

        Raises:
            ConfigError: Another process, or another writer of this one, holds it.
            OSError: The folder cannot be written, or its file system has no locks.
        """
        path = folder / LOCK
        descriptor = _locked(path)
        while descriptor is not None and not _is_at(path, descriptor):
            os.close(descriptor)  # its last holder has just removed that file
            descriptor = _locked(path)
        if descriptor is None:
            raise ConfigError(
                flag, f"{folder} is being written by {_holder(path)}; wait, or choose another"
            )
        started = datetime.now(UTC).isoformat(timespec="seconds")
        os.ftruncate(descriptor, 0)
        os.pwrite(
            descriptor, f"process {os.getpid()} on {platform.node()} since {started}\n".encode(), 0
        )
        self.release = weakref.finalize(self, _release, path, descriptor)


def _locked(path: Path) -> int | None:
    """The locked file, or None where another holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    try:
        with path.open(errors="replace") as stream:
            return " ".join(stream.read(_MOST_BYTES).split()) or "another process"
    except OSError:
        return "another process"


def _release(path: Path, descriptor: int) -> None:
    path.unlink(missing_ok=True)  # before the lock goes: afterwards it may be another's
    os.close(descriptor)
