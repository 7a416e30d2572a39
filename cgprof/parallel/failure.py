"""What a launched rank leaves for its launcher: the error that ended it, or its exit code.

No torch here: a rank can report before it has loaded anything.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from traceback import format_exception, format_exception_only

from cgprof.errors import CgprofError, RankError

FOLDER = "CGPROF_RANKS_FOLDER"  # the variable that says where the launcher looks
_RESULT = "result.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a rank ended; `at_ns` is of the clock that all processes of a host share."""

    reporter: int
    rank: int  # whose fault it is
    message: str
    exit_code: int
    at_ns: int
    traceback: str | None = None  # a file's path


def report_error(error: Exception) -> bool:
    """Tells the launcher which error ends this process, as `report_failure` does.

    One that is a bug is told with its traceback.
    """
    if _folder() is None:
        return False
    if isinstance(error, RankError):
        return report_failure(error.rank, error.problem, error.exit_code)
    own = int(os.environ["RANK"])
    if isinstance(error, CgprofError):
        return report_failure(own, str(error), error.exit_code)
    message = "".join(format_exception_only(error)).strip()
    trace = "".join(format_exception(error))
    return report_failure(own, message, CgprofError.exit_code, traceback=trace)


def report_failure(rank: int, message: str, exit_code: int, traceback: str | None = None) -> bool:
    """Tells the launcher why this process ends; call it before its peers can notice.

    A process's first report stays.

    Args:
        rank: Whose fault it is: this rank's, or a peer's that does not answer.
        message: What happened, without the rank.
        exit_code: 2 for a refused config or input, else 3.
        traceback: Of an error that is a bug; kept in a file that the launcher names.

    Returns:
        Whether a launcher will show it; if not, the rank has to.
    """
    folder = _folder()
    if folder is None:
        return False
    reporter = int(os.environ["RANK"])
    kept = folder / f"traceback-{reporter}.txt"
    failure = Failure(
        reporter=reporter,
        rank=rank,
        message=message,
        exit_code=exit_code,
        at_ns=time.monotonic_ns(),
        traceback=None if traceback is None else str(kept),
    )
    try:
        if traceback is not None:
            kept.write_text(traceback, errors="backslashreplace")
        _write_once(folder / f"failure-{reporter}.json", asdict(failure))
    except OSError:
        return False
    return True


def report_result(rank: int, exit_code: int) -> int:
    """Keeps rank 0's exit code for the launcher, to which any other than 0 is a failed rank.

    Returns:
        What this process has to end with: 0 under a launcher, else the exit code.
    """
    folder = _folder()
    if folder is None:
        return exit_code
    if rank == 0:
        _write_once(folder / _RESULT, {"exit_code": exit_code})
    return 0


def read_failures(folder: Path) -> list[Failure]:
    """Returns what ranks reported, earliest first."""
    found = [Failure(**json.loads(path.read_text())) for path in folder.glob("failure-*.json")]
    return sorted(found, key=lambda failure: failure.at_ns)


def read_result(folder: Path) -> int:
    """Returns the exit code that rank 0 kept, 0 if none."""
    try:
        code = json.loads((folder / _RESULT).read_text())["exit_code"]
    except FileNotFoundError:
        return 0
    return int(code)


def _folder() -> Path | None:
    found = os.environ.get(FOLDER)
    return Path(found) if found else None


def _write_once(path: Path, value: dict[str, object]) -> None:
    """Makes a whole file appear at once; one that is there already stays."""
    part = path.with_suffix(f".{threading.get_ident()}.part")
    part.write_text(json.dumps(value))
    with suppress(FileExistsError):
        os.link(part, path)
    part.unlink()
