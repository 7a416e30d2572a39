"""What one round of all ranks' numbers costs: over gloo, and over memory that the host shares.

    python -m tests.benchmarks.votes --ranks 4 --idle-ms 10

Both carriers take turns in the same processes, block by block: back to back, and after each rank's
host was idle, as it is while a step's device work is awaited. A rank sees the wait for the last one
as well; `after the last came` is without it. Clocks are one, since all ranks are on this host.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

import numpy as np
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from cgprof.parallel.groups import Ranks
from cgprof.parallel.rounds import NUM_VALUES, RoundKind, Rounds
from tests.benchmarks import votes
from tests.support.ranks import run_ranks

BLOCKS = 8
LIMIT_S = 30.0
GLOO, SHARED = "gloo", "shared memory"
VALUES = range(NUM_VALUES)


def measure(ranks: Ranks, idle_ms: float, rounds: int) -> dict[str, list[list[tuple[int, int]]]]:
    """Returns begin and end of this rank's rounds, by carrier and then idle (0) or not (1)."""
    store = PrefixStore("votes", _get_default_store())
    size = {"rank": ranks.rank, "size": ranks.size}
    carriers = {
        GLOO: Rounds(ranks.control, store, share_within_s=None, **size),
        SHARED: Rounds(ranks.control, store, share_within_s=LIMIT_S, **size),
    }
    assert carriers[SHARED].carrier == SHARED, carriers[SHARED].carrier
    times: dict[str, list[list[tuple[int, int]]]] = {name: [[], []] for name in carriers}
    for block in range(BLOCKS + 1):
        for name in sorted(carriers, reverse=bool(block % 2)):
            for phase, idle_s in enumerate((0.0, idle_ms / 1e3)):
                found = block_of(carriers[name], idle_s, rounds // BLOCKS)
                if block:
                    times[name][phase].extend(found)
    carriers[SHARED].close()
    return times


def block_of(rounds: Rounds, idle_s: float, count: int) -> list[tuple[int, int]]:
    found = []
    for _ in range(count):
        if idle_s:
            time.sleep(idle_s)
        begin = time.perf_counter_ns()
        rounds.start(RoundKind.VOTE, VALUES, timeout_s=LIMIT_S)
        rounds.finish()
        found.append((begin, time.perf_counter_ns()))
    return found


def summary(times: np.ndarray) -> dict[str, dict[str, int]]:
    """The p50 and p90 in ns of begins and ends, an array [P, rounds, 2]."""
    begins, ends = times[..., 0], times[..., 1]
    columns = {
        "as a rank sees it": (ends - begins).ravel(),
        "after the last came": ends.max(axis=0) - begins.max(axis=0),
    }
    return {
        name: {f"p{p}_ns": int(np.percentile(column, p)) for p in (50, 90)}
        for name, column in columns.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--idle-ms", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=800, help="of each kind")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    given = parser.parse_args()
    found = run_ranks(given.ranks, votes.measure, given.idle_ms, given.rounds, limit_s=500)
    result = {
        phase: {
            name: summary(np.array([of_rank[name][index] for of_rank in found]))
            for name in (GLOO, SHARED)
        }
        for index, phase in enumerate(("back to back", f"after {given.idle_ms:g} ms idle"))
    }
    if given.format == "json":
        print(json.dumps({"ranks": given.ranks, "cores": os.cpu_count(), "rounds": result}))
    else:
        report(given.ranks, result)
    return 0


def report(ranks: int, result) -> None:
    print(f"{ranks} ranks, {os.cpu_count()} cores; us, p50 / p90")
    print(f"{'':<20} {'':<14} {'as a rank sees it':>20} {'after the last came':>20}")
    for phase, carriers in result.items():
        for name, columns in carriers.items():
            cells = [f"{c['p50_ns'] / 1e3:.1f} / {c['p90_ns'] / 1e3:.1f}" for c in columns.values()]
            print(f"{phase:<20} {name:<14} {cells[0]:>20} {cells[1]:>20}")


if __name__ == "__main__":
    sys.exit(main())
