"""What an exchange of tokens takes inside a graph, against a graph of its collectives alone.

    torchrun --nproc-per-node 2 -m tests.benchmarks.exchange --tokens 1,64,256,2048

Device time of one exchange, there and back, by turns in one run: "collectives" is a graph of
nothing else on one stream, "handed over" the same from and to the compute stream. Below them all of
dispatch and combine with its packing, handed over and in line. The slowest rank's medians.
The GPUs have to be able to write to each other.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

import numpy as np
import torch

from cgprof.batch.context import Handoff, PlainHandoff
from cgprof.config.schema import All2AllBackend, ParallelConfig
from cgprof.graphs.cuda import CudaRecorder
from cgprof.microbatch.runner import StreamHandoff
from cgprof.moe.all_to_all import AllToAllDispatcher
from cgprof.moe.collectives import Exchange
from cgprof.moe.symmetric import SymmetricDispatcher
from cgprof.moe.traffic import RowFormat
from cgprof.parallel.grid import Rank
from cgprof.parallel.groups import Ranks, connect
from cgprof.stats.ratio import ratio_of_medians

Through = Callable[[Handoff], None]

EXCHANGES, REPLAYS = 48, 40
EXPERTS, HIDDEN, TOP_K = 128, 2048, 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="1,64,256,2048")
    sizes = [int(size) for size in parser.parse_args().tokens.split(",")]
    rank = Rank(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))
    parallel = ParallelConfig(
        data_parallel_size=rank.size, all2all_backend=All2AllBackend.ALL_TO_ALL
    )
    ranks = connect(rank, torch.device("cuda"), parallel)
    compute, comm = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.inference_mode(), torch.cuda.stream(compute):
        for size in sizes:
            told = compare(ranks, compute, comm, size)
            if rank.rank == 0:
                print(told, flush=True)
    ranks.close()
    return 0


def compare(ranks: Ranks, compute: torch.cuda.Stream, comm: torch.cuda.Stream, tokens: int) -> str:
    torch.manual_seed(ranks.rank)
    row = RowFormat(hidden_size=HIDDEN, itemsize=2, top_k=TOP_K)
    hidden = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    scores = torch.rand(tokens, EXPERTS, device="cuda")
    weights, ids = scores.topk(TOP_K)
    ids = ids.to(torch.int32)
    rows = ranks.size * row.block_rows(tokens)
    sent, received = torch.zeros(2, rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    collective = Exchange(ranks, "captured")
    handed, in_line = StreamHandoff(compute, comm), PlainHandoff()

    def collectives(handoff: Handoff) -> None:
        handoff.communicate(lambda: collective.all_to_all(received, sent))
        handoff.communicate(lambda: collective.all_to_all(sent, received))

    def exchange(kind: type[AllToAllDispatcher] | type[SymmetricDispatcher]) -> Through:
        dispatcher = kind(
            ranks,
            num_experts=EXPERTS,
            row=row,
            dtype=torch.bfloat16,
            max_tokens=tokens,
            num_microbatches=1,
        )
        dispatcher.lane = "captured"

        def there_and_back(handoff: Handoff) -> None:
            handle = dispatcher.dispatch(hidden, ids, weights, handoff)
            dispatcher.combine(handle, handle.hidden, handoff)

        return there_and_back

    to_all, writes = exchange(AllToAllDispatcher), exchange(SymmetricDispatcher)
    works = {
        "collectives": lambda: collectives(in_line),
        "handed over": lambda: collectives(handed),
        "all-to-all": lambda: to_all(handed),
        "all-to-all in line": lambda: to_all(in_line),
        "symmetric-memory": lambda: writes(handed),
        "symmetric-memory in line": lambda: writes(in_line),
    }
    times = device_times(compute, comm, list(works.values()))
    slowest = np.max(np.array(ranks.gather_objects(times)), axis=0)
    told = [f"{tokens} tokens a rank, us, over collectives alone:"]
    for name, one in zip(works, slowest, strict=True):
        ratio, low, high = ratio_of_medians(one, slowest[0], seed=0)
        told.append(f"  {name:25} {np.median(one) / 1e3:6.1f}  {ratio:.2f} [{low:.2f}, {high:.2f}]")
    return "\n".join(told)


def device_times(
    compute: torch.cuda.Stream, comm: torch.cuda.Stream, works: list[Callable[[], None]]
) -> list[list[int]]:
    """The device ns of one exchange in every replay of each graph."""
    recorder = CudaRecorder(compute, (comm,))
    graphs = []
    for work in works:
        recorder.warm_up(work)
        graph = recorder.record(lambda work=work: [work() for _ in range(EXCHANGES)])
        graph.instantiate()
        graphs.append(graph)
    times: list[list[int]] = [[] for _ in graphs]
    for replay in range(REPLAYS + 3):
        for graph, found in zip(graphs, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if replay >= 3:
                found.append(round(begin.elapsed_time(end) * 1e6 / EXCHANGES))
    for graph in graphs:
        graph.free()
    return times


if __name__ == "__main__":
    sys.exit(main())
