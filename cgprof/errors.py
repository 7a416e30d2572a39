"""The errors a user can act on; each message says where, what was found, and what to do.

Only `cgprof.cli.app` turns them into exit codes. Any other exception is a bug and keeps its
traceback.
"""

from __future__ import annotations

import errno
from typing import ClassVar

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


class CgprofError(Exception):
    """Something the user, the config or the machine caused."""

    exit_code: ClassVar[int] = 3


class ConfigError(CgprofError):
    """A setting is wrong by itself."""

    exit_code = 2

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: {problem}")
        self.where = where
        self.problem = problem


class UnsupportedError(ConfigError):
    """Each setting is fine, their combination is not; gives the reason and the way out."""


class DeviceError(CgprofError):
    """No GPU, too few of them, or a driver or library that is missing."""


class CaptureError(CgprofError):
    """One key could not be captured; the cause is chained."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"capture of {key} failed: {problem}")
        self.key = key
        self.problem = problem


class RecordingError(CgprofError):
    """A step did what a recording cannot hold; `GraphManager` wraps it and names the key."""


class ReplayError(CgprofError):
    """A replay would be wrong: an address moved, no such key, or a shape outside it."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"replay of {key} refused: {problem}")
        self.key = key
        self.problem = problem


class MicrobatchError(CgprofError):
    """A microbatch raised, or a wait for one ran out of time; names the first of them."""

    def __init__(self, index: int, problem: str) -> None:
        super().__init__(f"microbatch {index}: {problem}")
        self.index = index
        self.problem = problem


class RankError(CgprofError):
    """A rank failed, stopped answering, or is unlike the others."""

    def __init__(self, rank: int, problem: str) -> None:
        super().__init__(f"rank {rank}: {problem}")
        self.rank = rank
        self.problem = problem


class RefusedByRankError(RankError):
    """A rank refused its config or input."""

    exit_code = 2


class RecordError(CgprofError):
    """A run folder is unreadable, or of another schema version."""

    exit_code = 2

    def __init__(self, path: object, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = str(path)
        self.problem = problem


def is_lost_stream(error: OSError) -> bool:
    """Whether a stream of this process cannot be written: its reader is gone, or there is no room.

    A file that cannot be written has a name.
    """
    if isinstance(error, BrokenPipeError):
        return True
    return error.errno in _UNWRITABLE and error.filename is None
