import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cgprof import __version__
from cgprof.cli.app import ErrorsToExitCodes, app
from cgprof.errors import CaptureError, CgprofError, ConfigError, RecordError

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    *("plan", "capture", "check", "report", "compare"),
    *("generate", "inspect", "weights", "devices"),
)


def raising(error: BaseException) -> typer.Typer:
    """A program of the same group class whose one command raises."""
    program = typer.Typer(cls=ErrorsToExitCodes, pretty_exceptions_enable=False)

    @program.callback()
    def root() -> None: ...

    @program.command()
    def fail() -> None:
        typer.echo("data")
        raise error

    return program


def python(*args: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], cwd=ROOT, text=True, capture_output=True, check=False, **options
    )


def modules_loaded_by(*args: str) -> set[str]:
    code = (
        "import sys; from cgprof.cli.app import app\n"
        "try: app(sys.argv[1:], standalone_mode=False)\n"
        "finally: print(*sys.modules, file=sys.stderr)"
    )
    done = python("-c", code, *args)
    assert done.returncode == 0
    return set(done.stderr.split())


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("here", "wrong"), 2),
        (RecordError("run", "unreadable"), 2),
        (CaptureError("FULL-8", "empty"), 3),
        (CgprofError("broken"), 3),
    ],
)
def test_own_error_becomes_one_line_on_stderr_and_its_exit_code(error, code):
    result = CliRunner().invoke(raising(error), ["fail"])
    assert result.exit_code == code
    assert result.stdout == "data\n"
    assert result.stderr == f"error: {error}\n"


def test_bug_keeps_its_traceback():
    result = CliRunner().invoke(raising(ZeroDivisionError("bug")), ["fail"])
    assert isinstance(result.exception, ZeroDivisionError)


def test_interrupt_is_one_line_and_130():
    result = CliRunner().invoke(raising(KeyboardInterrupt()), ["fail"])
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


def test_console_script_and_runner_agree_on_errors():
    done = python("-m", "cgprof", "plan", "--block-size", "24")
    result = CliRunner().invoke(app, ["plan", "--block-size", "24"])
    assert (done.returncode, done.stderr) == (result.exit_code, result.stderr)
    assert done.returncode == 2
    assert "24 is not a power of two" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("args", [[], *([name] for name in COMMANDS)])
def test_help_documents_the_exit_codes(args):
    result = CliRunner().invoke(app, [*args, "--help"])
    assert result.exit_code == 0
    for code in "01234":
        assert f"\n  {code}  " in result.stdout


def test_help_lists_every_command():
    result = CliRunner().invoke(app, ["--help"])
    for name in COMMANDS:
        assert f"\n  {name} " in result.stdout


HEAVY = {"torch", "pandas", "numpy", "pyarrow", "scipy", "triton", "matplotlib", "rich", "pynvml"}


def test_help_loads_the_commands_and_nothing_else():
    loaded = modules_loaded_by("--help")
    assert not (HEAVY | {"pydantic", "tomllib", "json.decoder"}) & loaded
    ours = {name for name in loaded if name.startswith("cgprof") and "cgprof.cli" not in name}
    assert ours == {
        "cgprof",
        "cgprof.config",
        "cgprof.config.flags",
        "cgprof.ending",
        "cgprof.errors",
        "cgprof.report",
        "cgprof.report.formats",
    }


def test_help_of_a_command_loads_nothing_heavy():
    # Some releases of Typer parse a command's options with pydantic themselves.
    assert not HEAVY & modules_loaded_by("capture", "--help")


@pytest.mark.parametrize(
    "question", [(), ("--explain", "--dp-tokens", "4,8"), ("--max-num-seqs", "8", "--search")]
)
def test_plan_loads_no_torch(question):
    loaded = modules_loaded_by("plan", "--dbo", *question)
    assert "pydantic" in loaded
    assert not HEAVY & loaded


def test_version_is_printed():
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"cgprof {__version__}\n")


def test_devices_without_a_device_names_commands_that_have_the_flag(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = CliRunner().invoke(app, ["devices"])
    assert result.exit_code == 3
    assert "capture, check and generate run on the CPU with --device cpu" in result.stderr
