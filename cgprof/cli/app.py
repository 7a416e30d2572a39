"""The `cgprof` program: the one place that turns errors into a line on stderr and an exit code.

Nothing heavy is imported here or at the top of a command's module; `--help` stays quick.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated

import typer
from typer.core import TyperGroup

from cgprof import __version__
from cgprof.cli import capture, check, compare, devices, generate, plan, report, weights
from cgprof.errors import CgprofError

_INTERRUPTED = 130  # 128 + SIGINT
_BROKEN_PIPE = 141  # 128 + SIGPIPE
_OUTPUT_LOST = 3
_FULL = (errno.ENOSPC, errno.EDQUOT)

_EXIT_CODES = """Exit codes:

\b
0  done; compare: no difference that matters
1  a check failed; compare: regression
2  bad usage, config or input
3  a capture, a device, a rank or writing the output failed
4  check, compare: inconclusive, with --fail-on-inconclusive"""


class ErrorsToExitCodes(TyperGroup):
    """Runs a command; our own errors become one line and their exit code, all others stay bugs."""

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]  # Typer hides its base
        """Returns what the command returns.

        Raises:
            typer.Exit: The command failed, was interrupted, or its reader went away.
        """
        try:
            try:
                return super().invoke(ctx)
            finally:
                _flush_stdout()
        except CgprofError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as error:
            typer.echo("interrupted", err=True)
            raise typer.Exit(_INTERRUPTED) from error
        except BrokenPipeError as error:
            _drop_stdout()
            raise typer.Exit(_BROKEN_PIPE) from error
        except OSError as error:
            if error.errno not in _FULL:
                raise
            _drop_stdout()
            typer.echo(f"error: output: {error.strerror}; make room and run again", err=True)
            raise typer.Exit(_OUTPUT_LOST) from error


def _flush_stdout() -> None:
    # The interpreter has no stream where the caller closed stdout.
    if sys.stdout is None:
        raise CgprofError("output: stdout is closed; redirect it to a file or to /dev/null")
    sys.stdout.flush()


def _drop_stdout() -> None:
    """Sends what is still buffered nowhere, or the interpreter complains of it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


app = typer.Typer(
    name="cgprof",
    cls=ErrorsToExitCodes,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog=_EXIT_CODES,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cgprof {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Capture and profile CUDA graphs for LLM inference: launch time, graph memory, parity."""


for _command in (
    plan.plan,
    capture.capture,
    check.check,
    report.report,
    compare.compare,
    generate.generate,
    weights.weights,
    devices.devices,
):
    app.command(epilog=_EXIT_CODES)(_command)


def main() -> None:
    """Runs the program with the arguments of the process."""
    app()
