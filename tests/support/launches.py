"""Ranks that are small scripts, and what is left of them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from cgprof.parallel.launch import launch
from tests.support.children import environment

# What each script begins with; a script's first argument is the folder of the process ids.
_START = """
import ctypes, os, signal, sys, time
from pathlib import Path
from cgprof.parallel.launched import follow_launcher
follow_launcher()
from cgprof.parallel.deadline import Deadline, end_rank
from cgprof.parallel.failure import report_failure, report_result
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
here = Path(sys.argv[1])

def ready():
    (here / f"{rank}.part").write_text(str(os.getpid()))
    (here / f"{rank}.part").rename(here / f"{rank}.pid")
    while len(list(here.glob("*.pid"))) < size:
        time.sleep(0.01)
"""
_PARENT = """
import sys
from cgprof.errors import RankError
from cgprof.parallel.launch import launch
try:
    sys.exit(launch(2, sys.argv[1:], command=[sys.executable]))
except RankError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
"""


def write_script(folder: Path, body: str) -> list[str]:
    """Returns the command line, less the interpreter, that runs a rank's script."""
    script = folder / "rank.py"
    script.write_text(_START + body)
    pids = folder / "pids"
    pids.mkdir()
    return [str(script), str(pids)]


def launch_script(folder: Path, body: str, count: int = 2) -> int:
    """Launches the script here; PYTHONPATH has to lead to the package."""
    return launch(count, write_script(folder, body), command=[sys.executable])


def start_parent(command_line: Sequence[str]) -> subprocess.Popen[str]:
    """Launches two ranks from a process of its own, which tests can end."""
    return subprocess.Popen(
        [sys.executable, "-c", _PARENT, *command_line],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def process_ids(folder: Path) -> list[int]:
    """Returns the ranks of a script that are or were ready."""
    return [int(path.read_text()) for path in sorted((folder / "pids").glob("*.pid"))]


def alive(pids: Iterable[int]) -> list[int]:
    """Returns those that still run; one that only waits to be reaped does not."""
    running = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in "ZX":
            running.append(pid)
    return running


def until(condition: Callable[[], bool], limit_s: float) -> bool:
    """Returns whether the condition came true in time."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
