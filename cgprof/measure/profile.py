"""The launches of captured keys: eager, first and hot, key by key, then all keys in turn."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cgprof.errors import MicrobatchError, ReplayError
from cgprof.measure.clock import Clock
from cgprof.measure.exchange import exchange_traffic
from cgprof.measure.launch import Turn, round_robin, sample_steps
from cgprof.measure.nvml import NvmlDevice
from cgprof.measure.pace import host_pace_ns
from cgprof.measure.sampler import sampled
from cgprof.measure.stopping import CountRule, NoiseRule, StoppingRule
from cgprof.measure.warnings import (
    bound_by,
    launch_warnings,
    throttle_warnings,
)
from cgprof.record.graph import GraphRecord
from cgprof.record.samples import SampleSink

if TYPE_CHECKING:
    from cgprof.engine.worker import Engine

# Of a series of replays on several ranks, where no rank may stop before another.
_SAMPLES_OF_RANKS = 15


def profile_key(
    engine: Engine,
    record: GraphRecord,
    clock: Clock,
    sink: SampleSink,
    nvml: NvmlDevice | None = None,
) -> GraphRecord:
    """Returns the record with its launch times: eager, the first replay, then hot replays.

    All three run the same requests at the same padding. A record of a failed capture, and one whose
    replay is refused or whose microbatch raises, comes back with its failure.
    """
    if record.failure is not None:
        return record
    try:
        return _profile(engine, record, clock, sink, nvml)
    except (ReplayError, MicrobatchError) as error:
        return record.model_copy(update={"failure": str(error)})


def profile_round_robin(
    engine: Engine, records: Sequence[GraphRecord], clock: Clock, sink: SampleSink
) -> list[GraphRecord]:
    """Returns the records with the launch times of replays that take turns, key after key."""
    rounds = engine.config.measure.round_robin_rounds
    ready = [record for record in records if record.failure is None]
    if not rounds or not ready:
        return list(records)
    turns = [
        Turn(step=engine.live_step(record.key), decision=engine.decision_for(record.key))
        for record in ready
    ]
    with sampled(engine):
        series = round_robin(engine.runner, turns, clock, rounds)
    by_key = {record.key: samples for record, samples in zip(ready, series, strict=True)}
    done = []
    for record in records:
        samples = by_key.get(record.key)
        if samples is None:
            done.append(record)
            continue
        sink.append(record.label, "round-robin", samples.columns())
        update = {
            "round_robin": samples.stats(instrumented=_is_instrumented(engine)),
            "replays": engine.graphs.captured[record.key].replays,
            "round_robin_process_id": os.getpid(),
        }
        done.append(record.model_copy(update=update))
    return done


def _stopping_rule(engine: Engine, *, eager: bool) -> StoppingRule:
    """Ranks must run equally many steps, whatever noise each of them sees; eager ones are slow."""
    config = engine.config.measure
    if engine.runner.has_peers:
        usual = config.min_samples if eager else max(config.min_samples, _SAMPLES_OF_RANKS)
        return CountRule(min(config.max_samples, usual))
    return NoiseRule.from_config(config)


def _is_instrumented(engine: Engine) -> bool:
    return engine.config.measure.memory_sample_ms is not None


def _profile(
    engine: Engine,
    record: GraphRecord,
    clock: Clock,
    sink: SampleSink,
    nvml: NvmlDevice | None,
) -> GraphRecord:
    config, key = engine.config.measure, record.key
    step = engine.live_step(key)
    experts_hit = engine.expert_usage(step)
    traffic = exchange_traffic(engine, key, step)
    with sampled(engine):
        eager = sample_steps(
            engine.runner,
            step,
            clock,
            _stopping_rule(engine, eager=True),
            decision=engine.decision_for(key.as_eager()),
            warmup=config.warmup,
        )
        sink.append(record.label, "eager", eager.columns())
        engine.graphs.poison(key)
        replay = engine.decision_for(key)
        pace_before_ns = host_pace_ns(clock)
        first = sample_steps(engine.runner, step, clock, CountRule(1), decision=replay)
        sink.append(record.label, "first", first.columns())
        hot = sample_steps(
            engine.runner,
            step,
            clock,
            _stopping_rule(engine, eager=False),
            decision=replay,
            warmup=config.warmup,
        )
        sink.append(record.label, "hot", hot.columns())
        pace_ns = max(pace_before_ns, host_pace_ns(clock))
    first_replay_ns = int(first.launch_ns[0])
    instrumented = _is_instrumented(engine)
    eager_stats, hot_stats = (
        eager.stats(instrumented=instrumented),
        hot.stats(instrumented=instrumented),
    )
    doubts = [
        *launch_warnings(eager_stats, hot_stats, first_replay_ns, config.relative_noise),
        *throttle_warnings(() if nvml is None else nvml.slowdowns()),
    ]
    return record.model_copy(
        update={
            "eager": eager_stats,
            "replay": hot_stats,
            "first_replay_ns": first_replay_ns,
            "host_pace_ns": pace_ns,
            "bound": bound_by(eager_stats, hot_stats),
            "experts_hit": experts_hit,
            "exchange_moved_bytes": traffic.moved_bytes,
            "exchange_needed_bytes": traffic.needed_bytes,
            "replays": engine.graphs.captured[key].replays,
            "warnings": record.warnings + tuple(str(doubt) for doubt in doubts),
            "timing_process_id": os.getpid(),
        }
    )
