"""Where ranks meet: the store that the launcher or the first rank keeps."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from cgprof.errors import ConfigError, RankError
from cgprof.parallel.grid import Rank

_FIRST_PORT, _NUM_PORTS = 20000, 12000  # below the ports that Linux gives out by itself


def meet(rank: Rank, limit: timedelta) -> Store:
    """Returns the store that all ranks share.

    Raises:
        ConfigError: Nothing says where the ranks meet.
        RankError: The store could not be reached in time.
    """
    host, port = meeting_point(os.environ)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)
    try:
        met = rendezvous("env://", rank.rank, rank.size, timeout=limit)
        store: Store = next(iter(met))[0]
    except (RuntimeError, ValueError) as error:
        problem = f"no ranks met at {host}:{port}: {str(error).partition(chr(10))[0]}"
        raise RankError(rank.rank, problem) from error
    return PrefixStore("cgprof", store)


def meeting_point(environ: Mapping[str, str]) -> tuple[str, int]:
    """Returns host and port: MASTER_ADDR and MASTER_PORT, else those of a SLURM step.

    In a SLURM step that is its first node, and a port that follows from the job and step.

    Raises:
        ConfigError: There is neither.
    """
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if host is None:
        host = _first_node(environ.get("SLURM_STEP_NODELIST", ""))
    if port is None and "SLURM_JOB_ID" in environ:
        step = f"{environ['SLURM_JOB_ID']}{environ.get('SLURM_STEP_ID', '')}"
        port = str(_FIRST_PORT + int(re.sub(r"\D", "", step)) % _NUM_PORTS)
    if host is None or port is None or not port.isdecimal():
        raise ConfigError(
            "MASTER_ADDR, MASTER_PORT",
            f"found {host} and {port}; the ranks need the host and a free port of the first one: "
            "start them with --data-parallel-size, torchrun or srun, or set both",
        )
    return host, int(port)


def _first_node(nodes: str) -> str | None:
    """`gpu[07-09,12],big1` is gpu07 first."""
    found = re.match(r"([^\[,]+)(?:\[(\w+))?", nodes)
    return found and found[1] + (found[2] or "")
