"""One command on several ranks: it starts them, or is one of them."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import typer

from cgprof.errors import CgprofError, ConfigError

if TYPE_CHECKING:
    from cgprof.config.schema import RunConfig
    from cgprof.parallel.grid import Rank


def own_rank(run: RunConfig) -> Rank | None:
    """Returns which rank this process is; None for a run on one rank.

    Where several are asked for and none was started, starts them and ends with their exit code.

    Raises:
        ConfigError: As many ranks were started as the run does not ask for.
        RankError: A started rank failed.
    """
    from cgprof.parallel.launch import find_rank, launch

    count, rank = run.parallel.data_parallel_size, find_rank(os.environ)
    if rank is None:
        if count == 1:
            return None
        raise typer.Exit(launch(count, sys.argv[1:]))
    if rank.size != count:
        raise ConfigError(
            "--data-parallel-size", f"{count}, but {rank.size} ranks were started; make them equal"
        )
    return None if count == 1 else rank


def exit_code_of(rank: Rank | None, code: int) -> int:
    """Returns what this process has to end with, so that the launcher ends with `code`."""
    if rank is None:
        return code
    from cgprof.parallel.failure import report_result

    return report_result(rank.rank, code)


def is_launched() -> bool:
    """Whether a launcher tells the errors of this process."""
    from cgprof.parallel.failure import FOLDER

    return FOLDER in os.environ


def told_launcher(error: CgprofError) -> bool:
    """Leaves the error of a started rank to its launcher; False where there is none."""
    from cgprof.parallel.failure import report_error

    return report_error(error)
