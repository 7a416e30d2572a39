"""The loop over the plan: captures with memory readings around them, then launches per key."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cgprof.engine.room import device_memory
from cgprof.errors import CaptureError, MicrobatchError, ReplayError
from cgprof.graphs.estimate import estimate_graph_memory
from cgprof.graphs.modes import requested_mode
from cgprof.measure.accounting import DeviceReading, graph_memory, witness
from cgprof.measure.budget import MemoryBudget
from cgprof.measure.capture_times import CaptureWatch, watched_capture
from cgprof.measure.clock import Clock
from cgprof.measure.exchange import exchange_traffic
from cgprof.measure.launch import Turn, round_robin, sample_steps
from cgprof.measure.memory import MemoryReader, many_readings, used_bytes
from cgprof.measure.nvml import NvmlDevice
from cgprof.measure.sampler import Peak, sampling
from cgprof.measure.shortage import Shortage, largest_key, ran_out
from cgprof.measure.stopping import CountRule, NoiseRule, StoppingRule
from cgprof.measure.warnings import (
    MeasureWarning,
    bound_by,
    launch_warnings,
    memory_warnings,
    throttle_warnings,
)
from cgprof.parallel.agree import agree_success
from cgprof.record.graph import GraphMemory, GraphRecord, MemoryTotals, MemoryWitness
from cgprof.record.samples import SampleSink
from cgprof.shapes import GraphKey, RuntimeMode

if TYPE_CHECKING:
    from cgprof.engine.worker import Engine
    from cgprof.graphs.manager import CapturedGraph

Progress = Callable[[GraphKey], None]

TAPE_ARENA = "arena"
# Of a series on several ranks, where no rank may stop before another.
_SAMPLES_OF_RANKS = 15


@dataclass(slots=True, kw_only=True)
class CapturePoints:
    """Readings around the two halves of the plan, filled by `capture_keys`; None on the CPU."""

    start: DeviceReading | None = None
    after_plain: DeviceReading | None = None
    after_twins: DeviceReading | None = None
    first_reading_s: float = 0.0  # collecting all garbage, and settling the device
    shortages: dict[GraphKey, Shortage] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)  # label -> why, by measured memory


def stream_names(engine: Engine) -> dict[int, str]:
    """Returns the names of the engine's streams by CUDA handle; empty on the CPU."""
    named = ((engine.compute_stream, "compute"), (engine.comm_stream, "communication"))
    return {stream.cuda_stream: name for stream, name in named if stream is not None}


def capture_keys(
    engine: Engine, reader: MemoryReader, points: CapturePoints, progress: Progress
) -> Iterator[GraphRecord]:
    """Captures the plan in its order and yields one record a key; `progress` is called before each.

    A key that fails yields a record with its failure, and the next key is captured.
    """
    begun_s = time.monotonic()
    with many_readings(engine.device):
        before = points.start = points.after_plain = points.after_twins = reader.read()
        points.first_reading_s = time.monotonic() - begun_s
        for key in engine.plan.keys:
            progress(key)
            refusal = _over_budget(engine, points.start, before, key)
            if refusal is not None:
                points.left_out[str(key)] = refusal
                continue
            with watched_capture() as watch:
                record, before = _capture(engine, reader, points, key, before, watch)
            record = record.model_copy(
                update={"times": watch.times(), "capture_process_id": os.getpid()}
            )
            points.after_twins = before
            if not key.is_twin:
                points.after_plain = before
            yield record


def memory_totals(
    engine: Engine, points: CapturePoints, records: Sequence[GraphRecord]
) -> MemoryTotals:
    """Returns the growth over the plain keys and over the twins, and what stands beside it."""
    plain = _total(points.start, points.after_plain, [r for r in records if not r.key.is_twin])
    twins = _total(points.after_plain, points.after_twins, [r for r in records if r.key.is_twin])
    return MemoryTotals(
        source="tape-arena" if points.start is None else "device",
        outputs_bytes=engine.output.nbytes,
        plain_bytes=_headline(plain),
        twin_bytes=_headline(twins),
        plain_witness=plain,
        twin_witness=twins,
        kv_cache_bytes=engine.kv_cache.nbytes,
        weights_bytes=engine.weights_bytes,
    )


def profile_key(
    engine: Engine,
    record: GraphRecord,
    clock: Clock,
    sink: SampleSink,
    nvml: NvmlDevice | None = None,
) -> GraphRecord:
    """Returns the record with its launch times: eager, the first replay, then hot replays.

    All three run the same requests at the same padding. A record of a failed capture, and one
    whose replay is refused or whose microbatch raises, comes back with its failure.
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
    with _sampled(engine):
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


def _sampled(engine: Engine) -> AbstractContextManager[Peak]:
    return sampling(lambda: used_bytes(engine.device), engine.config.measure.memory_sample_ms)


def _stopping_rule(engine: Engine) -> StoppingRule:
    """Ranks must run equally many steps, whatever noise each of them sees."""
    config = engine.config.measure
    if engine.runner.has_peers:
        return CountRule(min(config.max_samples, max(config.min_samples, _SAMPLES_OF_RANKS)))
    return NoiseRule.from_config(config)


def _over_budget(
    engine: Engine, start: DeviceReading | None, now: DeviceReading | None, key: GraphKey
) -> str | None:
    """Why a key is left out by what the graphs before it took; equal on all ranks."""
    limit_bytes = engine.config.capture.max_graph_memory_bytes
    if limit_bytes is None or start is None or now is None:
        return None
    grown = witness(start, now)
    grown_bytes = grown.device_delta_bytes
    if grown.neighbours == "moved" and grown.nvml_delta_bytes is not None:
        grown_bytes = grown.nvml_delta_bytes
    estimate = estimate_graph_memory(engine.model_config, engine.config, key)
    first = not engine.graphs.captured
    refusal = MemoryBudget(limit_bytes).room_for(
        key,
        max(0, grown_bytes or 0),
        estimate.node_bytes + (estimate.pool_bytes if first else 0),
    )
    if engine.ranks is None:
        return refusal
    refusals = agree_success(engine.ranks, refusal, what=str(key))
    return next((f"rank {rank}: {why}" for rank, why in refusals.items()), None)


def _is_instrumented(engine: Engine) -> bool:
    return engine.config.measure.memory_sample_ms is not None


def _capture(
    engine: Engine,
    reader: MemoryReader,
    points: CapturePoints,
    key: GraphKey,
    before: DeviceReading | None,
    watch: CaptureWatch,
) -> tuple[GraphRecord, DeviceReading | None]:
    """One key's record, and the reading after it."""
    marks: dict[str, DeviceReading] = {}

    def mark(name: str) -> None:
        watch.mark(name)
        reading = reader.read_between()
        if reading is not None:
            marks[name] = reading
        watch.lap("readings")

    requested = requested_mode(engine.config.capture.policy, key).name
    with _sampled(engine) as peak:
        captured = _captured_or_failure(engine, points, key, mark)
    watch.lap(watch.under_way)
    # What a failed capture held is free by now: its exception is gone.
    after = reader.read()
    watch.lap("readings")
    if isinstance(captured, str):
        failed = GraphRecord(
            key=key,
            label=str(key),
            requested_mode=requested,
            effective_mode=RuntimeMode.NONE.name,
            failure=captured,
        )
        return failed, after
    if before is None or after is None:
        memory, seen, doubts = _tape_memory(captured)
    else:
        memory = graph_memory(before, marks, after)
        seen, doubts = witness(before, after), memory_warnings(memory, before, after)
    record = GraphRecord(
        key=key,
        label=str(key),
        requested_mode=requested,
        effective_mode=key.mode.name,
        sampled_peak_bytes=peak.most_bytes,
        capture_ns=captured.capture_ns,
        instantiate_ns=captured.instantiate_ns,
        nodes=dict(captured.recording.nodes),
        memory=memory,
        witness=seen,
        warnings=tuple(str(doubt) for doubt in doubts),
    )
    return record, after


def _captured_or_failure(
    engine: Engine, points: CapturePoints, key: GraphKey, mark: Callable[[str], None]
) -> CapturedGraph | str:
    try:
        return engine.capture(key, mark)
    except CaptureError as error:
        tried = ran_out(error)
        if tried is None:
            return str(error)
        free, total = device_memory(engine.device)
    graphs = engine.graphs.captured
    shortage = points.shortages[key] = Shortage(
        free_bytes=free,
        total_bytes=total,
        pool_bytes=sum(graph.recording.pool_bytes for graph in graphs.values()),
        tried=tried,
        largest_planned=max(planned.num_tokens for planned in engine.plan.keys),
    )
    return shortage.describe(key, largest_key(graphs))


def _tape_memory(
    captured: CapturedGraph,
) -> tuple[GraphMemory, MemoryWitness, list[MeasureWarning]]:
    """A tape's own accounting: the growth of the arena that all tapes share."""
    grown = captured.recording.pool_bytes
    memory = GraphMemory(pool_by_stream={TAPE_ARENA: grown})
    return memory, MemoryWitness(allocator_bytes=grown), []


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
    with _sampled(engine):
        eager = sample_steps(
            engine.runner,
            step,
            clock,
            _stopping_rule(engine),
            decision=engine.decision_for(key.as_eager()),
            warmup=config.warmup,
        )
        sink.append(record.label, "eager", eager.columns())
        engine.graphs.poison(key)
        replay = engine.decision_for(key)
        first = sample_steps(engine.runner, step, clock, CountRule(1), decision=replay)
        sink.append(record.label, "first", first.columns())
        hot = sample_steps(
            engine.runner,
            step,
            clock,
            _stopping_rule(engine),
            decision=replay,
            warmup=config.warmup,
        )
        sink.append(record.label, "hot", hot.columns())
    first_replay_ns = int(first.launch_ns[0])
    sampled = _is_instrumented(engine)
    eager_stats, hot_stats = eager.stats(instrumented=sampled), hot.stats(instrumented=sampled)
    doubts = [
        *launch_warnings(eager_stats, hot_stats, first_replay_ns, config.relative_noise),
        *throttle_warnings(() if nvml is None else nvml.slowdowns()),
    ]
    return record.model_copy(
        update={
            "eager": eager_stats,
            "replay": hot_stats,
            "first_replay_ns": first_replay_ns,
            "bound": bound_by(eager_stats, hot_stats),
            "experts_hit": experts_hit,
            "exchange_moved_bytes": traffic.moved_bytes,
            "exchange_needed_bytes": traffic.needed_bytes,
            "replays": engine.graphs.captured[key].replays,
            "warnings": record.warnings + tuple(str(doubt) for doubt in doubts),
            "timing_process_id": os.getpid(),
        }
    )


def _total(
    before: DeviceReading | None, after: DeviceReading | None, records: Sequence[GraphRecord]
) -> MemoryWitness:
    if before is not None and after is not None:
        return witness(before, after)
    arena = sum(record.memory.pool_bytes for record in records if record.memory is not None)
    return MemoryWitness(allocator_bytes=arena)


def _headline(seen: MemoryWitness) -> int:
    return seen.allocator_bytes if seen.device_delta_bytes is None else seen.device_delta_bytes
