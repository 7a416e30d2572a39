"""The `cgprof` program: the one place that turns errors into a line on stderr and an exit code.

Nothing heavy is imported here or at the top of a command's module; `--help` stays quick.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Annotated, Any, TextIO, cast

import typer
from typer.core import TyperGroup

from cgprof import __version__
from cgprof.cli import (
    capture,
    check,
    compare,
    devices,
    generate,
    inspect,
    nodes,
    plan,
    report,
    weights,
)
from cgprof.cli.ranks import is_launched, told_launcher
from cgprof.ending import ending
from cgprof.errors import CgprofError, ConfigError, is_lost_stream

_INTERRUPTED = 130  # 128 + SIGINT
_BROKEN_PIPE = 141  # 128 + SIGPIPE
_OUTPUT_LOST = 3
# Releases of Typer keep it in different places.
_UsageError = cast(type[typer.BadParameter], typer.BadParameter.__bases__[0])

_EXIT_CODES = """Exit codes:

\b
0  done; compare: no difference that matters
1  a check failed; compare: regression
2  bad usage, config or input
3  a capture, a device, a rank or writing the output failed
4  check, compare: inconclusive, with --fail-on-inconclusive"""


class ErrorsToExitCodes(TyperGroup):
    """Runs a command; what the user caused becomes one line and an exit code, bugs stay bugs."""

    def make_context(
        self, info_name: Any, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Returns the parsed program; help and version are printed here.

        Raises:
            typer.Exit: The arguments are wrong, or the output is lost.
        """
        with _errors_to_exits():
            _require_text(args)
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]  # Typer hides its base
        """Returns what the command returns.

        Raises:
            typer.Exit: The command failed, was interrupted, or its reader went away.
        """
        with _errors_to_exits():
            return super().invoke(ctx)


@contextmanager
def _errors_to_exits() -> Iterator[None]:
    try:
        try:
            yield
        except typer.Exit:
            _flush_stdout()
            raise
        _flush_stdout()
    except CgprofError as error:
        _tell(error)
        raise typer.Exit(error.exit_code) from error
    except _UsageError as error:
        _complain(_usage_line(error))
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt as error:
        _tell(error)
        raise typer.Exit(_INTERRUPTED) from error
    except BrokenPipeError as error:
        _drop(sys.stdout, sys.stderr)
        raise typer.Exit(_BROKEN_PIPE) from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            _complain(f"error: {_on_one_line(str(error.filename)[:100])}...: {error.strerror}")
            raise typer.Exit(ConfigError.exit_code) from error
        if not is_lost_stream(error):
            raise
        _drop(sys.stdout)
        _complain(f"error: output: {error.strerror}; make room or print elsewhere, and run again")
        raise typer.Exit(_OUTPUT_LOST) from error


def _require_text(args: Sequence[str]) -> None:
    # Libraries that read and write our files take no other names.
    for arg in args:
        try:
            arg.encode()
        except UnicodeEncodeError as error:
            raise ConfigError("arguments", f"{arg!a} is not UTF-8 text") from error


def _usage_line(error: typer.BadParameter) -> str:
    text = error.format_message()
    if text.startswith("Usage:"):  # the whole help, where no command was given
        return text
    text = " ".join(text.removesuffix(".").split()).replace("Value error, ", "")
    return f"error: {_on_one_line(text)}" + (
        f"; see {error.ctx.command_path} --help" if error.ctx else ""
    )


def _on_one_line(text: str) -> str:
    """Escapes what would break the line, or steer a terminal."""
    return "".join(mark if mark.isprintable() else repr(mark)[1:-1] for mark in text)


def _tell(error: CgprofError | KeyboardInterrupt) -> None:
    """Says what ended the program; a launched rank leaves that to its launcher."""
    if isinstance(error, KeyboardInterrupt):
        if not is_launched():
            _complain("interrupted")
    elif not told_launcher(error):
        _complain(f"error: {_on_one_line(str(error))}")


def _complain(line: str) -> None:
    """Prints to stderr; without one, the exit code says enough."""
    try:
        typer.echo(line, err=True)
    except OSError:
        _drop(sys.stderr)


def _flush_stdout() -> None:
    # The interpreter has no stream where the caller closed stdout.
    if sys.stdout is None:
        raise CgprofError("output: stdout is closed; redirect it to a file or to /dev/null")
    sys.stdout.flush()


def _drop(*streams: TextIO) -> None:
    """Sends what is still buffered nowhere, or the interpreter complains of it at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(nowhere, stream.fileno())


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
    nodes.nodes,
    compare.compare,
    generate.generate,
    weights.weights,
    inspect.inspect,
    devices.devices,
):
    app.command(epilog=_EXIT_CODES)(_command)


def main() -> None:
    """Runs the program with the arguments of the process."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a locale without the letters is no bug
    with ending():
        app()
