"""What graphs will weigh, before any is captured: nodes, the driver's bytes for them, the pool.

Pure. Every figure is an estimate: nodes are counted from the engine's own code, bytes a node come
from kept runs on one H200, and the pool from the sizes of the tensors that are alive at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cgprof.config.schema import All2AllBackend, ModelConfig, RunConfig
from cgprof.graphs.passes import ExchangeKind, Pass, exchange_kind, passes_of
from cgprof.graphs.pool_size import logits_bytes, pool_bytes
from cgprof.record.alone import ARENA_STEP_BYTES
from cgprof.shapes import GraphKey

_OF_PASS = 2  # embedding, last norm
_OF_ATTENTION = 6  # norm, qkv, heads, attention, projection, norm of the feed-forward part
_OF_MLP = 3  # gate and up, activation, down
_OF_EXPERTS = 6  # gate, route, group, gate and up, down, sum
# Source: four runs on an H200 (torch 2.11): at hidden size 2048 the matmul library splits one
# matmul a layer up to 64 tokens (and at some sizes up to 108), at 576 none.
_SPLIT_MATMUL_TOKENS, _SPLIT_MATMUL_HIDDEN = 64, 2048
# Source: the same runs: 2.8 to 3.6 KB a node (NVML's growth of the process without the pool).
_NODE_BYTES = 3200
_OF_FINISH = 3  # head, and its split of a small matmul; argmax
# Source: runs on two and four H200s, plain keys and twins together: 3 to 8 KB more for each (none
# to see in plain keys alone, whose first arena is there already). They have 4 KB of arguments.
_COLLECTIVE_BYTES = 7000
# Source: a server on two H200s, 11 graphs of 97 all-reduces: 0.24 GiB with NCCL's graph mixing,
# 0.13 GiB without. Far from exact, and of another engine.
_EVENT_RECORD_BYTES = 110_000
# Source: twice the largest error over the kept runs (15 %), since the constants come from them.
ERROR_SHARE = 0.3
# Of plain keys and of twins, whichever of the two errors is more. Source: the smallest kept run.
ERROR_BYTES = 2 * ARENA_STEP_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exchange:
    """Nodes of one layer's exchange."""

    kernels: int = 0
    copies: int = 0
    collectives: int = 0  # one kernel each; with NCCL's graph mixing an event record besides


_EXCHANGES = {
    ExchangeKind.NONE: _Exchange(),
    ExchangeKind.LOOPBACK: _Exchange(copies=4),  # hidden states, ids, weights; sums
    # place, send, unpack, home
    ExchangeKind.ALL_TO_ALL: _Exchange(kernels=4, collectives=2),
    # place, send, wait, unpack; return, wait, home
    ExchangeKind.PEER_WRITES: _Exchange(kernels=7),
    # ids and weights into the block, unpack; hidden states are one copy
    ExchangeKind.ALL_GATHER: _Exchange(kernels=3, copies=1, collectives=2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphEstimate:
    """One graph by itself. `error_share` None: never compared with a measured run."""

    nodes: dict[str, int]  # kind -> count, in the words of a graph's record
    node_bytes: int  # of the driver
    pool_bytes: int  # that this graph alone would need of the shared pool
    error_share: float | None

    @property
    def num_nodes(self) -> int:
        """Nodes of all kinds."""
        return sum(self.nodes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEstimate:
    """All graphs of a plan: nodes of each, the pool once. Twins are what they add, if any."""

    plain_bytes: int
    twin_bytes: int | None
    error_share: float | None
    finish_bytes: int | None = None  # beside them, of the graphs that finish decode steps, if any

    @property
    def total_bytes(self) -> int:
        """Plain keys and twins."""
        return self.plain_bytes + (self.twin_bytes or 0)


def estimate_graph_memory(model: ModelConfig, run: RunConfig, key: GraphKey) -> GraphEstimate:
    """Returns nodes and bytes of one graph."""
    nodes = estimate_nodes(model, run, key)
    return GraphEstimate(
        nodes=nodes,
        node_bytes=bytes_of_nodes(nodes, num_collectives(model, run, key)),
        pool_bytes=pool_bytes(model, run, (key,)),
        error_share=error_share(run),
    )


def estimate_plan(model: ModelConfig, run: RunConfig, keys: Sequence[GraphKey]) -> PlanEstimate:
    """Returns what these keys take together, captured in this order."""
    plain = tuple(key for key in keys if not key.is_twin)
    plain_bytes, whole_bytes = (
        pool_bytes(model, run, some) + arena_bytes(node_bytes(model, run, key) for key in some)
        for some in (plain, keys)
    )
    return PlanEstimate(
        plain_bytes=plain_bytes,
        twin_bytes=whole_bytes - plain_bytes if len(plain) < len(keys) else None,
        error_share=error_share(run),
        finish_bytes=_finish_bytes(model, run, keys),
    )


def estimate_nodes(model: ModelConfig, run: RunConfig, key: GraphKey) -> dict[str, int]:
    """Returns how many nodes of each kind the graph of a key has."""
    exchange = _EXCHANGES[exchange_kind(model, run)]
    passes = passes_of(model, run, key)
    layers = model.num_layers * len(passes)
    kernels = sum(
        _OF_PASS + model.num_layers * _layer_kernels(model, run, one, exchange) for one in passes
    )
    records = num_collectives(model, run, key) if run.parallel.nccl_graph_mixing else 0
    found = {
        "kernel": kernels,
        "memcpy": layers * exchange.copies,
        "event-record": records,
        "event-wait": 1 if records else 0,
    }
    return {kind: count for kind, count in found.items() if count}


def num_collectives(model: ModelConfig, run: RunConfig, key: GraphKey) -> int:
    """Returns how many of a graph's kernels are collectives."""
    passes = len(passes_of(model, run, key))
    return passes * model.num_layers * _EXCHANGES[exchange_kind(model, run)].collectives


def node_bytes(model: ModelConfig, run: RunConfig, key: GraphKey) -> int:
    """Returns what the driver keeps for the nodes of one graph."""
    return bytes_of_nodes(estimate_nodes(model, run, key), num_collectives(model, run, key))


def bytes_of_nodes(nodes: dict[str, int], collectives: int = 0) -> int:
    """Returns what the driver keeps for nodes, by kind; so many kernels are collectives."""
    return _COLLECTIVE_BYTES * collectives + sum(
        count * (_EVENT_RECORD_BYTES if kind == "event-record" else _NODE_BYTES)
        for kind, count in nodes.items()
    )


def arena_bytes(of_graphs: Iterable[int]) -> int:
    """Returns what the driver takes from the device for the nodes of several graphs."""
    return -(-sum(of_graphs) // ARENA_STEP_BYTES) * ARENA_STEP_BYTES


def error_share(run: RunConfig) -> float | None:
    """Returns how far off an estimate may be; None for an exchange that no kept run has."""
    parallel = run.parallel
    if parallel.data_parallel_size == 1 or parallel.all2all_backend is All2AllBackend.ALL_TO_ALL:
        return ERROR_SHARE
    return None


def _finish_bytes(model: ModelConfig, run: RunConfig, keys: Sequence[GraphKey]) -> int | None:
    """What the graphs of logits and tokens take, one a padded number of requests."""
    counts = {key.num_reqs for key in keys if key.num_reqs is not None}
    if not counts or not run.capture.finish_graphs:
        return None
    nodes = bytes_of_nodes({"kernel": _OF_FINISH * len(counts)})
    return logits_bytes(model, max(counts)) + arena_bytes([nodes])


def _layer_kernels(model: ModelConfig, run: RunConfig, one: Pass, exchange: _Exchange) -> int:
    experts = _OF_EXPERTS + (1 if model.uniform_routing else 0)  # weights are set to one
    splits_matmul = (
        not run.model.batch_invariant
        and one.num_tokens <= _SPLIT_MATMUL_TOKENS
        and model.hidden_size >= _SPLIT_MATMUL_HIDDEN
    )
    return (
        _OF_ATTENTION
        + (experts if model.is_moe else _OF_MLP)
        + (1 if one.num_splits > 1 else 0)
        + (1 if splits_matmul else 0)
        + exchange.kernels
        + exchange.collectives
    )
