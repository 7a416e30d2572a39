"""What becomes of the output: full disks, closed streams, readers that went away, odd terminals."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cgprof.record.store import read_run

ROOT = Path(__file__).resolve().parents[2]
LOST = "error: output: No space left on device; make room or print elsewhere, and run again\n"
CLOSED = "error: output: stdout is closed; redirect it to a file or to /dev/null\n"
HELP, PLAN, REFUSED = ("--help",), ("plan", "--format", "csv"), ("plan", "--block-size", "24")


def run(args, *, shell="", **environment):
    """Runs the program behind redirections of a shell; returns its exit code and stderr."""
    done = subprocess.run(
        ["bash", "-c", f'exec "$0" -m cgprof "$@" {shell}', sys.executable, *args],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr, done.stdout


@pytest.mark.parametrize("args", [HELP, ("plan", "--help"), ("--version",), PLAN])
def test_full_stdout_is_one_line_and_3(args):
    assert run(args, shell=">/dev/full")[:2] == (3, LOST)


@pytest.mark.parametrize("args", [HELP, PLAN])
def test_closed_stdout_is_one_line_and_3(args):
    assert run(args, shell=">&-")[:2] == (3, CLOSED)


def test_stdout_that_cannot_be_written_is_one_line_and_3():
    code, message, _ = run(PLAN, shell="1</dev/null")
    assert (code, len(message.splitlines())) == (3, 1)
    assert "Bad file descriptor" in message


@pytest.mark.parametrize("shell", ["2>/dev/full", "2>&-"])
@pytest.mark.parametrize("args", [REFUSED, ("plan", "--nope")])
def test_exit_code_survives_a_lost_stderr(args, shell):
    assert run(args, shell=shell)[0] == 2


@pytest.mark.parametrize("args", [HELP, ("plan", "--help"), PLAN])
def test_reader_that_went_away_is_quiet_and_141(args):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "cgprof", *args],
        cwd=ROOT,
        stdout=write,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_no_home_no_colour_and_a_narrow_terminal_change_no_data():
    plain = run(PLAN)
    odd = run(PLAN, TERM="dumb", NO_COLOR="1", COLUMNS="20")
    assert plain == odd == run(PLAN, shell="", HOME="")
    code, message, text = run(HELP, TERM="dumb", NO_COLOR="1", COLUMNS="20")
    assert (code, message) == (0, "")
    assert "\x1b" not in text


def test_argument_that_is_no_text_is_refused(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    for args in (("report", folder), ("capture", "-o", folder), ("plan", "--set", "\udcff=1")):
        code, message, text = run([*map(str, args)])
        assert (code, text, len(message.splitlines())) == (2, "", 1)
        assert "is not UTF-8 text" in message
    assert list(tmp_path.iterdir()) == []


def test_disk_that_fills_in_a_run_is_one_line_and_leaves_a_folder_that_says_partial(tmp_path):
    folder = tmp_path / "run"
    args = (
        *("capture", "--model", "tiny-dense", "--device", "cpu", "--mode", "none"),
        *("--max-num-seqs", "4", "--max-model-len", "96", "-o", str(folder)),
    )
    script = 'ulimit -f 4; exec "$0" -m cgprof "$@"'
    done = subprocess.run(
        ["bash", "-c", script, sys.executable, *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (2, 3)
    assert done.stderr.splitlines()[-1].endswith("summary.json: cannot be written: File too large")
    assert "Traceback" not in done.stderr
    assert not list(folder.glob("*.part"))
    if (folder / "summary.json").exists():
        assert read_run(folder).status == "partial"
