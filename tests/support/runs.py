"""Whole runs made by hand, with samples: plain keys, a twin, a failed key; CUDA and tape."""

import numpy as np

from cgprof.config.schema import MicrobatchConfig, ModelConfig, RunConfig
from cgprof.record.graph import (
    GraphMemory,
    GraphRecord,
    LaunchStats,
    MemoryTotals,
    MemoryWitness,
    ParityResult,
    StageStats,
)
from cgprof.record.place import Device, Environment
from cgprof.record.samples import SampleSink
from cgprof.record.store import RunWriter
from cgprof.record.types import DecisionCount, PlanRecord, RankRecord, RunRecord, SkippedKey
from cgprof.shapes import CapturePolicy, DecisionReason, GraphKey, RuntimeMode

KIB, MIB = 1024, 1024**2
MODEL = ModelConfig(
    name="tiny-moe",
    family="qwen3_moe",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=128,
    vocab_size=256,
    num_experts=8,
    experts_per_token=2,
    expert_ffn_size=32,
    max_positions=512,
)
PHASES = {"eager": "eager", "replay": "hot", "round_robin": "round-robin"}
STAGES = ("decide", "prepare", "launch", "finish", "wait", "device")


def key(num_tokens, num_microbatches=1):
    return GraphKey(
        mode=RuntimeMode.FULL,
        num_tokens=num_tokens,
        num_reqs=num_tokens,
        uniform_query_len=1,
        num_microbatches=num_microbatches,
    )


def stats(median_ns, count=20):
    return LaunchStats(
        count=count,
        median_ns=median_ns,
        iqr_ns=median_ns // 50,
        p95_ns=median_ns * 11 // 10,
        min_ns=median_ns * 9 // 10,
        outliers=0,
        noise=0.02 if count >= 5 else None,
        stopped_by="noise",
    )


def stages(launch_ns, device_ns=None, count=20):
    return StageStats(
        decide=stats(2_000, count),
        prepare=stats(150_000, count),
        launch=stats(launch_ns, count),
        finish=stats(40_000, count),
        wait=stats(900_000, count),
        device=None if device_ns is None else stats(device_ns, count),
        step=stats(1_092_000 + launch_ns, count),
    )


def leg(name, *, passed=True, **facts):
    facts = {"replays": 3, "tokens_compared": 12, "max_abs_diff": 0.0} | facts
    bitwise = bool(passed) and name != "step-reference"
    return ParityResult(leg=name, passed=passed, bitwise_equal=bitwise, **facts)


def all_legs():
    reference = {"max_abs_diff": 0.001, "floor": 0.002, "tolerance": 0.004}
    return (
        leg("replay-eager"),
        leg("step-reference", cases=("contexts 1, 15, 16, 17",), **reference),
        leg("poisoned-padding"),
    )


def cuda_graph(graph_key, *, launch_ns=20_000, delta_bytes=4 * MIB, **changes):
    facts = {
        "key": graph_key,
        "label": str(graph_key),
        "capture_ns": 80_000_000,
        "instantiate_ns": 3_000_000,
        "nodes": {"kernel": 600 * graph_key.num_microbatches, "memset": 2},
        "memory": GraphMemory(
            pool_by_stream={"compute": MIB, "communication": 512 * KIB},
            instantiate_bytes=2 * MIB,
            outputs_bytes=0,
            workspaces={"main/compute": 64 * KIB},
            rest_bytes=delta_bytes - 2 * MIB - MIB - 512 * KIB - 64 * KIB,
        ),
        "witness": MemoryWitness(
            allocator_bytes=MIB + 512 * KIB,
            device_delta_bytes=delta_bytes,
            nvml_delta_bytes=delta_bytes,
        ),
        "eager": stages(40_000_000, 5_000_000),
        "replay": stages(launch_ns, 4_000_000),
        "round_robin": stages(2 * launch_ns, 4_000_000),
        "first_replay_ns": 300_000,
        "experts_hit": 7.5,
        "parity": all_legs(),
        "replays": 42,
    }
    return GraphRecord(**(facts | changes))


def tape_graph(graph_key, **changes):
    facts = {
        "key": graph_key,
        "label": str(graph_key),
        "capture_ns": 9_000_000,
        "instantiate_ns": 1_000,
        "nodes": {"kernel": 90 * graph_key.num_microbatches},
        "memory": GraphMemory(pool_by_stream={"cpu": 96 * KIB}),
        "witness": MemoryWitness(allocator_bytes=128 * KIB),
        "eager": stages(3_000_000),
        "replay": stages(1_000_000),
        "round_robin": stages(1_100_000),
        "first_replay_ns": 1_500_000,
        "experts_hit": 7.5,
        "parity": all_legs(),
        "replays": 42,
    }
    return GraphRecord(**(facts | changes))


def failed_graph(graph_key, failure="out of memory: 3 MiB free, lower --max-capture-size"):
    return GraphRecord(key=graph_key, label=str(graph_key), failure=failure)


def totals(source, plain_bytes, twin_bytes):
    on_device = source == "device"

    def witness(num_bytes):
        return MemoryWitness(
            allocator_bytes=num_bytes // 2,
            device_delta_bytes=num_bytes if on_device else None,
            nvml_note=None if on_device else "no NVML on this machine",
        )

    return MemoryTotals(
        source=source,
        outputs_bytes=MIB,
        plain_bytes=plain_bytes,
        twin_bytes=twin_bytes,
        plain_witness=witness(plain_bytes),
        twin_witness=witness(twin_bytes),
        kv_cache_bytes=8 * MIB,
        weights_bytes=16 * MIB,
    )


def run_record(recorder, graphs, *, rank_totals=None, dbo=False, **changes):
    facts = {
        "run_id": "a1b2",
        "status": "complete",
        "recorder": recorder,
        "started_at": "2026-11-30T10:22:05Z",
        "config": RunConfig(microbatch=MicrobatchConfig(enabled=dbo)),
        "config_fingerprint": "c0ffee",
        "model": MODEL,
        "plan": _plan(graphs),
        "environment": _environment(on_cuda=recorder == "cuda"),
        "timer_floor_ns": 40,
        "recording_overhead_ns": 900,
        "ranks": (RankRecord(graphs=tuple(graphs), decisions=_decisions(dbo), totals=rank_totals),),
    }
    return RunRecord(**(facts | changes))


def cuda_run(**changes):
    """Two plain keys and no twins."""
    graphs = (cuda_graph(key(64)), cuda_graph(key(8), launch_ns=10_000, delta_bytes=MIB))
    return run_record("cuda", graphs, rank_totals=totals("device", 320 * MIB, 0), **changes)


def cuda_dbo_run(**changes):
    """Two plain keys, a twin, and a twin that failed."""
    graphs = (
        cuda_graph(key(64)),
        cuda_graph(key(8), launch_ns=10_000, delta_bytes=MIB),
        cuda_graph(key(64, 2), launch_ns=36_000, delta_bytes=9 * MIB),
        failed_graph(key(32, 2)),
    )
    rank_totals = totals("device", 320 * MIB, 330 * MIB)
    return run_record("cuda", graphs, rank_totals=rank_totals, dbo=True, **changes)


def tape_dbo_run(**changes):
    """A plain key and a twin on the CPU."""
    graphs = (tape_graph(key(8)), tape_graph(key(8, 2)))
    rank_totals = totals("tape-arena", 96 * KIB, 48 * KIB)
    return run_record("tape", graphs, rank_totals=rank_totals, dbo=True, **changes)


def samples_of(record, spread=0.01, seed=0):
    """Samples scattered evenly around the medians of the record, as the store collects them."""
    rng = np.random.default_rng(seed)
    sink = SampleSink()
    for rank in record.ranks:
        for graph in rank.graphs:
            for field, phase in PHASES.items():
                recorded = getattr(graph, field)
                if recorded is not None:
                    sink.append(graph.label, phase, _columns(recorded, rng, spread))
    return sink


def write_run(path, record, spread=0.01):
    """Writes the record and its samples as a run folder."""
    writer = RunWriter(path)
    writer.samples = samples_of(record, spread)
    writer.write(record)
    return path


def _columns(recorded, rng, spread):
    def scattered(one):
        if one is None:
            return None
        offsets = rng.permutation(np.linspace(-spread, spread, one.count))
        return np.rint(one.median_ns * (1 + offsets)).astype(np.int64)

    return {f"{name}_ns": scattered(getattr(recorded, name)) for name in STAGES}


def _plan(graphs):
    return PlanRecord(
        requested_policy=CapturePolicy.FULL,
        policy=CapturePolicy.FULL_DECODE_ONLY,
        policy_reason="attention runs uniform batches only",
        labels=tuple(graph.label for graph in graphs),
        skipped=(
            SkippedKey(key=key(512, 2), label=str(key(512, 2)), reason="unreachable: 256 rows"),
        ),
        uncovered_batches=(9, 10, 11, 15),
        fingerprint="beef",
    )


def _environment(on_cuda):
    device = Device(
        index=0,
        name="NVIDIA H200",
        uuid="GPU-1",
        total_bytes=141 * 1024 * MIB,
        driver="580.159",
    )
    return Environment(
        cgprof="0.1.0",
        python="3.12.3",
        torch="2.11.0",
        triton="3.6.0" if on_cuda else None,
        cuda="13.0" if on_cuda else None,
        hostname="node-1",
        platform="Linux",
        cpu="Xeon 8480",
        device=device if on_cuda else None,
    )


def _decisions(dbo):
    return (
        DecisionCount(label="FULL-8x8q1", reason=DecisionReason.GRAPH, count=30),
        DecisionCount(label="NONE-600", reason=DecisionReason.NO_FIT, count=4, eager_split=dbo),
    )
