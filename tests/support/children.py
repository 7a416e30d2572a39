"""The command line in a process of its own, that is ended in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a child ended."""

    process_id: int
    code: int
    stdout: str
    stderr: str


def environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def start(args: Sequence[str], script: str | None = None) -> subprocess.Popen[str]:
    """Starts `cgprof ARGS`, or a script that is given them."""
    program = ["-m", "cgprof"] if script is None else ["-c", script]
    return subprocess.Popen(
        [sys.executable, *program, *args],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_line(child: subprocess.Popen[str], beginning: str) -> list[str]:
    """Reads the child's progress until a line begins so; returns all lines so far."""
    lines: list[str] = []
    for line in child.stderr:
        lines.append(line)
        if line.startswith(beginning):
            return lines
    raise AssertionError(f"no line begins with {beginning!r} in {lines}")


def end_at(args: Sequence[str], beginning: str, by: signal.Signals = signal.SIGKILL) -> Ended:
    """Sends a child a signal as soon as a line of its progress begins so."""
    with start(args) as child:
        lines = wait_for_line(child, beginning)
        child.send_signal(by)
        stdout, stderr = child.communicate(timeout=60)
    return Ended(
        process_id=child.pid,
        code=child.returncode,
        stdout=stdout,
        stderr="".join([*lines, stderr]),
    )


def run(args: Sequence[str], script: str | None = None, timeout_s: float = 100) -> Ended:
    """Lets a child run to its end."""
    with start(args, script) as child:
        stdout, stderr = child.communicate(timeout=timeout_s)
    return Ended(process_id=child.pid, code=child.returncode, stdout=stdout, stderr=stderr)
