"""Hand-made records of runs."""

from __future__ import annotations

from cgprof.config.schema import ModelConfig, RunConfig
from cgprof.record.graph import GraphMemory, GraphRecord, LaunchStats, MemoryWitness, StageStats
from cgprof.record.place import Environment
from cgprof.record.types import PlanRecord, RankRecord, RunRecord
from cgprof.shapes import CapturePolicy, GraphKey, RuntimeMode


def launch_stats(median_ns=1000, **changes):
    fields = {
        "count": 10,
        "median_ns": median_ns,
        "iqr_ns": median_ns // 100,
        "p95_ns": median_ns,
        "min_ns": median_ns,
        "outliers": 0,
        "noise": 0.01,
        "stopped_by": "noise",
    }
    return LaunchStats(**{**fields, **changes})


def stage_stats(launch_ns=1000, device_ns=None, **changes):
    stage = launch_stats()
    return StageStats(
        decide=stage,
        prepare=stage,
        launch=launch_stats(launch_ns, **changes),
        finish=stage,
        wait=stage,
        device=None if device_ns is None else launch_stats(device_ns),
    )


def graph_record(num_tokens=8, **changes):
    key = GraphKey(
        mode=RuntimeMode.FULL, num_tokens=num_tokens, num_reqs=num_tokens, uniform_query_len=1
    )
    fields = {
        "key": key,
        "label": str(key),
        "capture_ns": 10_000,
        "nodes": {"kernel": 12},
        "memory": GraphMemory(pool_by_stream={"arena": 4096}),
        "witness": MemoryWitness(allocator_bytes=4096),
        "eager": stage_stats(50_000),
        "replay": stage_stats(5_000),
    }
    return GraphRecord(**{**fields, **changes})


def run_record(graphs=(), **changes):
    model = ModelConfig(
        name="tiny",
        family="qwen3",
        num_layers=1,
        hidden_size=8,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        ffn_size=8,
        vocab_size=16,
        max_positions=32,
    )
    fields = {
        "run_id": "a-run",
        "status": "partial",
        "recorder": "tape",
        "started_at": "2026-01-01T00:00:00Z",
        "config": RunConfig(),
        "config_fingerprint": "f" * 8,
        "model": model,
        "plan": PlanRecord(
            requested_policy=CapturePolicy.FULL,
            policy=CapturePolicy.FULL,
            labels=("FULL-8x8q1",),
            fingerprint="e" * 8,
        ),
        "environment": Environment(
            cgprof="0", python="3", torch="2", hostname="a-host", platform="Linux"
        ),
        "ranks": (RankRecord(graphs=tuple(graphs)),),
    }
    return RunRecord(**{**fields, **changes})
