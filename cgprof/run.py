"""A whole run in one screen: plan, build, capture, profile, check, serve; all in one folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from cgprof.accuracy.parity import ParityChecker
from cgprof.batch.request import Request
from cgprof.config.compat import check
from cgprof.config.load import fingerprint
from cgprof.config.schema import ModelConfig, RunConfig
from cgprof.engine.engine import serve
from cgprof.engine.worker import Engine
from cgprof.errors import CgprofError
from cgprof.graphs.modes import ResolvedPolicy, resolve_policy
from cgprof.graphs.plan import CapturePlan, make_plan
from cgprof.graphs.plan_record import plan_record
from cgprof.measure.clock import Clock, clock_for, timer_floor_ns
from cgprof.measure.device import current_device
from cgprof.measure.launch import recording_overhead_ns
from cgprof.measure.memory import MemoryReader
from cgprof.measure.nvml import NvmlDevice
from cgprof.measure.profile import (
    CapturePoints,
    capture_keys,
    memory_totals,
    profile_key,
    profile_round_robin,
    stream_names,
)
from cgprof.record.environment import collect
from cgprof.record.store import RunWriter
from cgprof.record.types import (
    DecisionCount,
    Failure,
    GraphRecord,
    RankRecord,
    RunRecord,
)
from cgprof.shapes import GraphSupport, RuntimeMode

Progress = Callable[[str], None]


def plan_run(run: RunConfig, model: ModelConfig) -> tuple[ResolvedPolicy, CapturePlan]:
    """Returns the policy that the run really has and the plan that follows from it.

    Raises:
        ConfigError: A setting or a combination is refused.
    """
    check(run, model)
    policy = resolve_policy(run.capture.policy, GraphSupport.ALWAYS)
    return policy, make_plan(policy.policy, run.limits, run.capture, run.microbatch)


def capture_run(
    run: RunConfig,
    model: ModelConfig,
    *,
    output_dir: Path | None,
    force: bool,
    progress: Progress,
) -> tuple[Path, RunRecord]:
    """Captures, profiles and checks every planned key; the folder is rewritten after each of them.

    Raises:
        CgprofError: The run is refused, or the device cannot hold it. A key that fails is a
            record with its failure.
    """
    started = time.monotonic()
    policy, plan = plan_run(run, model)
    stamp = datetime.now(UTC)
    name = f"{stamp:%Y%m%dT%H%M%SZ}_{model.name}_{policy.policy.value}"
    writer = RunWriter(output_dir or Path("runs") / name, force=force)
    progress(f"building {model.name}")
    engine = Engine(run, model, plan)
    try:
        with engine.active():
            job = _Job(engine, writer, progress, started)
            job.begin(name, policy, stamp)
            job.capture()
            job.profile()
            job.check_parity()
            job.serve()
            job.save("failed" if job.failed else "complete")
    finally:
        engine.close()
    return writer.path, job.record


class _Job:
    """One run under way: its records so far, saved after every step of it."""

    def __init__(
        self, engine: Engine, writer: RunWriter, progress: Progress, started: float
    ) -> None:
        self._engine = engine
        self._writer = writer
        self._progress = progress
        self._started = started
        self._clock: Clock = clock_for(engine.device)
        self._nvml: NvmlDevice | None = None
        self._graphs: list[GraphRecord] = []
        self._seconds: dict[str, float] = {}

    @property
    def failed(self) -> bool:
        """Whether a key failed."""
        return any(graph.failure for graph in self._graphs)

    def begin(self, run_id: str, policy: ResolvedPolicy, stamp: datetime) -> None:
        """Opens the record with what is known before any capture."""
        engine = self._engine
        device, self._nvml, doubt = current_device(engine.device)
        self.record = RunRecord(
            run_id=run_id,
            status="partial",
            recorder=engine.recorder.kind,
            started_at=stamp.isoformat(timespec="seconds"),
            config=engine.config,
            config_fingerprint=fingerprint(engine.config, engine.model_config),
            model=engine.model_config,
            plan=plan_record(policy, engine.plan),
            environment=collect(device),
            timer_floor_ns=timer_floor_ns(self._clock),
            recording_overhead_ns=recording_overhead_ns(self._clock),
            notes=_notes(engine, doubt),
        )
        self._seconds["start to engine ready"] = time.monotonic() - self._started
        self.save("partial")

    def capture(self) -> None:
        """Captures every planned key with memory readings around each."""
        engine = self._engine
        reader = MemoryReader(engine.device, self._nvml, stream_names(engine))
        points = CapturePoints()
        count = len(engine.plan.keys)
        begun = time.monotonic()
        keys = capture_keys(
            engine,
            reader,
            points,
            lambda key: self._progress(f"capture {len(self._graphs) + 1}/{count} {key}"),
        )
        for graph in keys:
            if not self._graphs:
                self._seconds["start to first captured key"] = time.monotonic() - self._started
            self._graphs.append(graph)
            self.save("partial")
        for kind in (False, True):
            nanoseconds = sum(
                (graph.capture_ns or 0) + (graph.instantiate_ns or 0)
                for graph in self._graphs
                if graph.key.is_twin is kind
            )
            self._seconds[f"capture of {'twins' if kind else 'plain keys'}"] = nanoseconds / 1e9
        self._seconds["capture with memory readings"] = time.monotonic() - begun
        self._totals = memory_totals(engine, points, self._graphs)

    def profile(self) -> None:
        """Times every captured key, eager and replay, then all of them in turn."""
        for index, graph in enumerate(self._graphs):
            self._progress(f"profile {index + 1}/{len(self._graphs)} {graph.label}")
            self._graphs[index] = profile_key(
                self._engine, graph, self._clock, self._writer.samples, self._nvml
            )
            self.save("partial")
        self._graphs = profile_round_robin(
            self._engine, self._graphs, self._clock, self._writer.samples
        )
        self.save("partial")

    def check_parity(self) -> None:
        """Compares every captured key with eager and with the reference."""
        if not self._engine.config.accuracy.parity:
            return
        checker = ParityChecker(self._engine)
        for index, graph in enumerate(self._graphs):
            if graph.failure is not None:
                continue
            self._progress(f"parity {index + 1}/{len(self._graphs)} {graph.label}")
            update = {
                "parity": checker.check(graph.key),
                "replays": self._engine.graphs.captured[graph.key].replays,
            }
            self._graphs[index] = graph.model_copy(update=update)
            self.save("partial")

    def serve(self) -> None:
        """Serves a short workload, so that the report can say how real steps were decided."""
        engine = self._engine
        engine.live.clear()
        engine.runner.decisions.clear()
        self._progress("serving a short workload")
        try:
            serve(engine, workload(engine.config, engine.model_config))
        except CgprofError as error:
            failure = Failure(where="serve", error=type(error).__name__, message=str(error))
            self.record = self.record.model_copy(
                update={"failures": (*self.record.failures, failure)}
            )

    def save(self, status: str) -> None:
        """Rewrites the folder."""
        decisions = tuple(
            DecisionCount(
                label=str(key),
                reason=reason,
                count=count,
                eager_split=key.mode is RuntimeMode.NONE and key.num_microbatches > 1,
            )
            for (key, reason), count in sorted(
                self._engine.runner.decisions.items(), key=lambda item: str(item[0][0])
            )
        )
        rank = RankRecord(
            graphs=tuple(self._graphs),
            decisions=decisions if status != "partial" else (),
            totals=getattr(self, "_totals", None),
        )
        self.record = self.record.model_copy(
            update={"status": status, "ranks": (rank,), "process_seconds": dict(self._seconds)}
        )
        self._writer.write(self.record)


def workload(run: RunConfig, model: ModelConfig) -> list[Request]:
    """Returns a seeded mix of short and long prompts, as many as the engine holds at once."""
    rng = np.random.default_rng(run.seed)
    limits = run.limits
    longest = max(1, min(limits.max_model_len - 8, limits.max_num_batched_tokens))
    lengths = np.minimum(rng.geometric(1 / 96, limits.max_num_seqs), longest)
    lengths[0] = longest
    return [
        Request(
            request_id=str(index),
            prompt=tuple(rng.integers(0, model.vocab_size, int(length)).tolist()),
            max_new_tokens=int(min(4 + index % 8, limits.max_model_len - int(length))),
        )
        for index, length in enumerate(lengths)
    ]


def _notes(engine: Engine, doubt: str | None) -> tuple[str, ...]:
    notes = []
    if engine.microbatches is not None:
        notes.append(
            "one device: the expert exchange is a loopback on the communication stream, for plain "
            "keys as well; there was nothing to hide"
        )
    if engine.recorder.kind == "tape":
        notes.append("recorder tape: times are CPU stand-in times, not a GPU's")
    return (*notes, doubt) if doubt else tuple(notes)
