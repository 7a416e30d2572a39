"""Starts a fresh process for one measurement, and takes its answer; whatever fails is a value.

Memory of a graph alone, and the kernels of a step that no graph was captured before, can only be
read where nothing else has happened. Free the run's engine first: the process builds its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Literal

from pydantic import Field, ValidationError

import cgprof
from cgprof.config.schema import ModelConfig, RunConfig
from cgprof.record.alone import StandAlone
from cgprof.record.contents import Counts
from cgprof.record.strict import NonNegative, Record
from cgprof.shapes import GraphKey

ANSWER = "answer.json"
_MODULE = "cgprof.fresh.process"
_GRACE_S = 10.0  # from SIGKILL until the driver must have let go of a process
_LAST_BYTES = 8192
_LINE_LENGTH = 300


class FreshTask(Record):
    """What a fresh process is to do; the engine that it builds is this run's, with its seeds.

    "alone" captures the one key; "eager-work" runs one eager step a key and captures nothing.
    """

    kind: Literal["alone", "eager-work"]
    run: RunConfig
    model: ModelConfig
    keys: tuple[GraphKey, ...]


class FreshAnswer(Record):
    """What it found, or why it found nothing."""

    alone: StandAlone | None = None
    work: dict[str, Counts] = Field(default_factory=dict)  # by label of the key
    problems: dict[str, str] = Field(default_factory=dict)  # why a key has no work
    failure: str | None = None
    process_id: NonNegative | None = None


def run_fresh(
    task: FreshTask, *, timeout_s: float, command: Sequence[str] | None = None
) -> FreshAnswer:
    """Returns the answer of a fresh process, which has ended by then; call it in the main thread.

    The process dies with this one, and when this one is interrupted.

    Args:
        task: What to do.
        timeout_s: After it the process and all that it started are killed.
        command: What to run instead; it gets this process's id and a folder as arguments.
    """
    if task.run.parallel.data_parallel_size > 1:
        return FreshAnswer(
            failure="one process alone has nobody to exchange tokens with; the run had "
            f"{task.run.parallel.data_parallel_size} ranks"
        )
    argv = list(command or (sys.executable, "-P", "-m", _MODULE))
    try:
        return _run(task, argv, timeout_s)
    except OSError as error:  # no room for its files, or for one more process
        return FreshAnswer(failure=f"the fresh process could not be run: {error}")


def _run(task: FreshTask, argv: Sequence[str], timeout_s: float) -> FreshAnswer:
    with tempfile.TemporaryDirectory(prefix="cgprof-fresh-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        question, log = folder / "task.json", folder / "stderr"
        question.write_text(task.model_dump_json())
        with question.open("rb") as stdin, log.open("wb") as stderr:
            process = _start([*argv, str(os.getpid()), name], stdin, stderr)
            end = _end_of(process, timeout_s)
        return _answer(folder, process.pid, end, log)


def measure_alone(
    run: RunConfig, model: ModelConfig, key: GraphKey, *, timeout_s: float
) -> StandAlone:
    """Returns what one key holds in a fresh process, or why that is not known."""
    task = FreshTask(kind="alone", run=run, model=model, keys=(key,))
    answer = run_fresh(task, timeout_s=timeout_s)
    if answer.alone is not None:
        return answer.alone
    failure = answer.failure or "the fresh process answered without a figure"
    return StandAlone(
        key=key, label=str(key), nodes=0, failure=failure, process_id=answer.process_id
    )


def _start(argv: Sequence[str], stdin: IO[bytes], stderr: IO[bytes]) -> subprocess.Popen[bytes]:
    """Starts it as the leader of a group of its own, with the very cgprof that runs here."""
    source = str(Path(cgprof.__file__).parents[1])
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        argv,
        stdin=stdin,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,
    )


def _end_of(process: subprocess.Popen[bytes], timeout_s: float) -> str | None:
    """Waits, kills the group of one that does not end, and returns how it ended; None: well."""
    status: int | None = None
    try:
        with suppress(subprocess.TimeoutExpired):
            status = process.wait(timeout_s)
    finally:
        if process.returncode is None:  # so its number is still its own
            os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
    if process.returncode is None:
        return f"took longer than {timeout_s:g} s and does not end though it was killed"
    if status is None:
        return f"took longer than {timeout_s:g} s and was killed"
    if status < 0:
        return f"was killed by {_signal_name(-status)}"
    return f"ended with exit code {status}" if status else None


def _signal_name(number: int) -> str:
    """The name of a signal; those for real time have none."""
    names = {one.value: one.name for one in signal.Signals}
    return names.get(number, f"signal {number}")


def _answer(folder: Path, process_id: int, end: str | None, log: Path) -> FreshAnswer:
    """An answer that is there holds, even if its process did not get out of the driver well."""
    try:
        return FreshAnswer.model_validate_json((folder / ANSWER).read_bytes())
    except FileNotFoundError:
        problem = end or "ended without an answer"
    except ValidationError as error:
        problem = f"gave an answer that cannot be read: {error.errors()[0]['msg']}"
    last = _last_line(log)
    failure = f"the fresh process {problem}" + (f": {last}" if last else "")
    return FreshAnswer(failure=failure, process_id=process_id)


def _last_line(log: Path) -> str:
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - _LAST_BYTES))
        text = stream.read().decode(errors="replace")
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    return lines[-1][:_LINE_LENGTH] if lines else ""
