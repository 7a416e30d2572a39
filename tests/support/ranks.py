"""Runs a function on several ranks: processes that stay for the next test of their kind."""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch
import torch.distributed as dist

from cgprof.config.schema import ParallelConfig
from cgprof.parallel.grid import Rank
from cgprof.parallel.groups import connect

LIMIT_S = 60.0
_ROOT = str(Path(__file__).parents[2])
_QUICK = ParallelConfig(replay_timeout_s=20, startup_timeout_s=40)


def run_ranks(
    size: int,
    function: Callable[..., object],
    *args: object,
    device: Literal["cpu", "cuda"] = "cpu",
    parallel: ParallelConfig = _QUICK,
    may_die: Collection[int] = (),
    spoils: bool = False,
    limit_s: float = LIMIT_S,
) -> list[object]:
    """Calls `function(ranks, *args)` on every rank and returns the results in rank order.

    The function is one of a module, its arguments and results can be pickled. An error on a rank
    is an AssertionError here with that rank's traceback. Ranks that `may_die` give None then.
    `spoils`: it leaves ranks at different points, so their processes are not used again.
    """
    team = _teams.pop((size, device, parallel), None) or _Team(size, device, parallel)
    try:
        results = team.call(function, args, set(may_die), limit_s)
    except BaseException:
        team.end()
        raise
    if team.is_whole and not spoils:
        _teams[size, device, parallel] = team
    else:
        team.end()
    return results


@dataclass(frozen=True, slots=True)
class _Failed:
    text: str


class _Team:
    """The processes of one size, device and config."""

    def __init__(self, size: int, device: str, parallel: ParallelConfig) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._links: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for index in range(size):
            here, there = context.Pipe()
            rank = Rank(index, size, index)
            args = (rank, device, self._store.port, parallel, there)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            there.close()
            self._links.append(here)
            self._processes.append(process)

    @property
    def is_whole(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def call(
        self,
        function: Callable[..., object],
        args: tuple[object, ...],
        may_die: set[int],
        limit_s: float,
    ) -> list[object]:
        task = pickle.dumps((function, args))
        for link in self._links:
            link.send_bytes(task)
        results: dict[int, object] = {}
        end = time.monotonic() + limit_s
        while len(results) < len(self._links):
            waiting = [link for rank, link in enumerate(self._links) if rank not in results]
            ready = wait(waiting, timeout=max(0.0, end - time.monotonic()))
            if not ready:
                raise AssertionError(self._hung(results, limit_s))
            for link in ready:
                rank = self._links.index(link)
                results[rank] = self._answer(rank, may_die)
        failures = [f"rank {r}:\n{x.text}" for r, x in results.items() if isinstance(x, _Failed)]
        if failures:
            raise AssertionError("\n".join(failures))
        return [results[rank] for rank in range(len(self._links))]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def _answer(self, rank: int, may_die: set[int]) -> object:
        try:
            return pickle.loads(self._links[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join()
            return (
                None
                if rank in may_die
                else _Failed(f"ended with code {self._processes[rank].exitcode}")
            )

    def _hung(self, results: dict[int, object], limit_s: float) -> str:
        """Lets every process that is still there write its stacks to stderr."""
        hung = [rank for rank in range(len(self._links)) if rank not in results]
        for rank in hung:
            process = self._processes[rank]
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        wait([self._processes[rank].sentinel for rank in hung], timeout=1)
        answers = {rank: getattr(x, "text", x) for rank, x in results.items()}
        return f"ranks {hung} gave no answer in {limit_s} s (stacks are on stderr); had {answers}"


_teams: dict[tuple[int, str, ParallelConfig], _Team] = {}


@atexit.register
def _end_all() -> None:
    for team in _teams.values():
        team.end()


def _serve(rank: Rank, device: str, port: int, parallel: ParallelConfig, link: Connection) -> None:
    faulthandler.register(signal.SIGUSR1)
    if _ROOT not in sys.path:
        sys.path.insert(0, _ROOT)
    torch.set_num_threads(1)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    ranks = connect(rank, torch.device(device), parallel)
    while True:
        try:
            function, args = pickle.loads(link.recv_bytes())
        except EOFError:
            return
        attempt = _Attempt()
        with attempt, torch.inference_mode():
            attempt.answer = function(ranks, *args)
        link.send_bytes(pickle.dumps(attempt.answer))


class _Attempt:
    """Keeps the answer of its block, or the traceback of whatever it raised."""

    answer: object = None

    def __enter__(self) -> None:
        return

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.answer = _Failed("".join(traceback.format_exception(kind, error, trace)))
        return True
