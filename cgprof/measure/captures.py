"""The loop over the plan: each key captured, with memory readings around it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cgprof.engine.room import device_memory, ran_out
from cgprof.errors import CaptureError
from cgprof.graphs.estimate import estimate_graph_memory
from cgprof.graphs.modes import requested_mode
from cgprof.measure.accounting import DeviceReading, graph_memory, witness
from cgprof.measure.budget import MemoryBudget
from cgprof.measure.capture_times import CaptureWatch, watched_capture
from cgprof.measure.memory import MemoryReader, many_readings
from cgprof.measure.sampler import sampled
from cgprof.measure.shortage import Shortage, largest_key
from cgprof.measure.warnings import (
    MeasureWarning,
    memory_warnings,
)
from cgprof.parallel.agree import agree_success
from cgprof.record.graph import GraphMemory, GraphRecord, MemoryTotals, MemoryWitness
from cgprof.shapes import GraphKey, RuntimeMode

if TYPE_CHECKING:
    from cgprof.engine.worker import Engine
    from cgprof.graphs.manager import CapturedGraph

Progress = Callable[[GraphKey], None]

TAPE_ARENA = "arena"


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
        communicators={} if engine.ranks is None else dict(engine.ranks.communicator_bytes),
        finish_graphs_bytes=engine.finish_graphs.device_bytes,
    )


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
    with sampled(engine) as peak:
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


def _total(
    before: DeviceReading | None, after: DeviceReading | None, records: Sequence[GraphRecord]
) -> MemoryWitness:
    if before is not None and after is not None:
        return witness(before, after)
    arena = sum(record.memory.pool_bytes for record in records if record.memory is not None)
    return MemoryWitness(allocator_bytes=arena)


def _headline(seen: MemoryWitness) -> int:
    return seen.allocator_bytes if seen.device_delta_bytes is None else seen.device_delta_bytes
