"""Tiny configs, engines and named batches that tests of several rooms share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cgprof.config.schema import (
    CaptureConfig,
    Limits,
    MeasureConfig,
    MicrobatchConfig,
    ModelConfig,
    RunConfig,
)
from cgprof.engine.worker import Engine
from cgprof.graphs.plan import make_plan
from cgprof.parallel.groups import Ranks
from cgprof.shapes import CapturePolicy


def tiny_model(**changes: Any) -> ModelConfig:
    """A Qwen3-MoE of two layers; `num_experts=0` makes it dense."""
    fields: dict[str, Any] = {
        "name": "tiny",
        "family": "qwen3_moe",
        "num_layers": 2,
        "hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "ffn_size": 48,
        "vocab_size": 128,
        "num_experts": 8,
        "experts_per_token": 2,
        "expert_ffn_size": 32,
        "max_positions": 4352,
        "dtype": "float32",
    }
    fields.update(changes)
    if not fields["num_experts"]:
        fields.update(family="qwen3", experts_per_token=0, expert_ffn_size=0)
    return ModelConfig(**fields)


def tiny_run(
    policy: CapturePolicy = CapturePolicy.FULL_DECODE_ONLY,
    *,
    sizes: tuple[int, ...] | None = (1, 2, 4, 8),
    dbo: bool = False,
    device: str = "cpu",
    batch_invariant: bool = False,
    **limits: int,
) -> RunConfig:
    """A run of at most 8 requests whose twins begin at 4 tokens."""
    bounds = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 320, **limits}
    return RunConfig.model_validate(
        {
            "model": {"batch_invariant": batch_invariant},
            "limits": Limits(**bounds),
            "capture": CaptureConfig(policy=policy, sizes=sizes),
            "microbatch": MicrobatchConfig(
                enabled=dbo, decode_token_threshold=4, prefill_token_threshold=24, timeout_s=20
            ),
            "measure": MeasureConfig.model_validate({"device": device, "context_len": 24}),
        }
    )


def build_engine(
    run: RunConfig, model: ModelConfig | None = None, ranks: Ranks | None = None
) -> Engine:
    """An engine with nothing captured."""
    plan = make_plan(run.capture.policy, run.limits, run.capture, run.microbatch)
    return Engine(run, model or tiny_model(), plan, ranks)


@contextmanager
def captured_engine(
    run: RunConfig, model: ModelConfig | None = None, ranks: Ranks | None = None
) -> Iterator[Engine]:
    """An engine inside `active()` with every planned key captured; closed afterwards."""
    engine = build_engine(run, model, ranks=ranks)
    try:
        with engine.active():
            for key in engine.plan.keys:
                engine.capture(key, lambda phase: None)
            yield engine
    finally:
        engine.close()
