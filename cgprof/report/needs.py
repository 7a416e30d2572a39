"""What checks read of a run, each with what a report says where it is not there. Pure."""

from __future__ import annotations

from collections.abc import Callable

from cgprof.record.types import RankRecord
from cgprof.report.finding import Need
from cgprof.report.memory_sum import own_growth_bytes, saw_neighbour

_SEEN_NEIGHBOURS = ("none", "still", "moved")  # else the list of processes was not read


def _of_ranks(lacking: str, is_there: Callable[[RankRecord], bool]) -> Need:
    """A need that one rank meets for all."""
    return Need(lacking, lambda run: any(map(is_there, run.ranks)))


def _has_neighbours(rank: RankRecord) -> bool:
    witnesses = [graph.witness for graph in rank.graphs]
    if rank.totals is not None:
        witnesses += [rank.totals.plain_witness, rank.totals.twin_witness]
    seen = any(one is not None and one.neighbours in _SEEN_NEIGHBOURS for one in witnesses)
    return seen or any(map(saw_neighbour, rank.graphs))


DEVICE = Need("recorder tape: no device", lambda run: run.recorder == "cuda")
LIMIT = Need(
    "no --max-graph-memory", lambda run: run.config.capture.max_graph_memory_bytes is not None
)
GRAPHS = _of_ranks("no key captured", lambda rank: bool(rank.graphs))
TWINS = _of_ranks("no twins", lambda rank: any(graph.key.is_twin for graph in rank.graphs))
STEPS = _of_ranks("no steps served", lambda rank: any(one.count for one in rank.decisions))
EAGER_WORK = _of_ranks(
    "no eager work to compare with",
    lambda rank: any(one.equal is not None for one in rank.against_eager.values()),
)
TOTALS = _of_ranks(
    "memory of the whole run not read",
    lambda rank: rank.totals is not None and rank.totals.source == "device",
)
NVML_TOTALS = _of_ranks(
    "no figure of NVML",
    lambda rank: rank.totals is not None and rank.totals.plain_witness.nvml_delta_bytes is not None,
)
NEIGHBOURS_SEEN = _of_ranks("processes on the device not read", _has_neighbours)
GROWTH = _of_ranks(
    "memory of keys not read",
    lambda rank: any(own_growth_bytes(graph) is not None for graph in rank.graphs),
)
POOL = _of_ranks(
    "pool of keys not read", lambda rank: any(graph.memory is not None for graph in rank.graphs)
)
CONTENTS = _of_ranks("nodes not read one by one", lambda rank: bool(rank.contents))
LAUNCH_MODEL = _of_ranks("no launch model", lambda rank: rank.launch_model is not None)
REPLAY_COSTS = _of_ranks("no replay costs", lambda rank: bool(rank.replay_costs))
PREDICTED = _of_ranks(
    "no replay beside the launch model",
    lambda rank: any(cost.predicted and cost.beside for cost in rank.replay_costs.values()),
)
TRACED = _of_ranks(
    "no traced launch", lambda rank: any(cost.traced for cost in rank.replay_costs.values())
)
TIMES = _of_ranks(
    "no key timed", lambda rank: any(graph.eager or graph.replay for graph in rank.graphs)
)
PACE = Need(
    "pace of the host beside two keys not read",
    lambda run: sum(bool(one.host_pace_ns) for rank in run.ranks for one in rank.graphs) > 1,
)
