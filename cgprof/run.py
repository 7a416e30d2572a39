"""Whole runs, each in one screen: plan, build, capture, profile or check; all in one folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path

from cgprof.accuracy.choice import CheckOptions, ChosenTask, choose_task, sample_keys
from cgprof.accuracy.faults import find_fault, planted
from cgprof.accuracy.greedy import check_greedy
from cgprof.accuracy.parity import ParityChecker
from cgprof.accuracy.result import Scored
from cgprof.accuracy.score import score_both, score_task
from cgprof.accuracy.sensitivity import judge_fault, leg_colours
from cgprof.accuracy.weights import check_weights
from cgprof.config.compat import check
from cgprof.config.load import fingerprint
from cgprof.config.schema import ModelConfig, RunConfig
from cgprof.engine.engine import serve
from cgprof.engine.worker import Engine
from cgprof.engine.workload import workload
from cgprof.errors import CgprofError, ConfigError
from cgprof.graphs.modes import ResolvedPolicy
from cgprof.graphs.plan import CapturePlan
from cgprof.graphs.plan_record import plan_record, resolve_plan
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
    CheckRecord,
    DecisionCount,
    Failure,
    GraphRecord,
    RankRecord,
    RunRecord,
)
from cgprof.shapes import GraphKey, RuntimeMode

Progress = Callable[[str], None]


def plan_run(run: RunConfig, model: ModelConfig) -> tuple[ResolvedPolicy, CapturePlan]:
    """Returns the policy that the run really has and the plan that follows from it.

    Raises:
        ConfigError: A setting or a combination is refused.
    """
    check(run, model)
    return resolve_plan(run)


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
    choice = choose_task(model, seed=run.seed)
    with _started(run, model, output_dir, force, progress) as job:
        job.capture()
        job.profile()
        if run.accuracy.parity:
            job.check_parity()
        job.score(choice)
        job.serve()
    return job.folder, job.record


def check_run(
    run: RunConfig,
    model: ModelConfig,
    options: CheckOptions,
    *,
    output_dir: Path | None,
    force: bool,
    progress: Progress,
) -> tuple[Path, RunRecord]:
    """Captures the plan without timing it and checks it: parity, greedy runs, weights, a task.

    Raises:
        CgprofError: The run is refused, or the device cannot hold it. A key that fails is a
            record with its failure.
    """
    options.validate(run)
    choice = choose_task(
        model, options.task, kind=options.task_kind, limit=options.limit, seed=run.seed
    )
    with _started(run, model, output_dir, force, progress) as job:
        job.capture()
        job.check(options, choice)
    return job.folder, job.record


@contextmanager
def _started(
    run: RunConfig, model: ModelConfig, output_dir: Path | None, force: bool, progress: Progress
) -> Iterator[_Job]:
    """Builds the engine and opens the folder; at the end the record says how it went."""
    started = time.monotonic()
    policy, plan = plan_run(run, model)
    stamp = datetime.now(UTC)
    name = f"{stamp:%Y%m%dT%H%M%SZ}_{model.name}_{policy.policy.value}"
    folder = output_dir or Path("runs") / name
    writer = RunWriter(folder, force=force, numbered=output_dir is None)
    progress(f"building {model.name}")
    engine = Engine(run, model, plan)
    try:
        with engine.active():
            job = _Job(engine, writer, progress, started)
            job.begin(name, policy, stamp)
            yield job
            job.save("failed" if job.failed else "complete")
    finally:
        engine.close()


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
    def folder(self) -> Path:
        """Where the run is kept."""
        return self._writer.path

    @property
    def failed(self) -> bool:
        """Whether a key, or anything outside the keys, failed."""
        return bool(self.record.failures) or any(graph.failure for graph in self._graphs)

    def begin(self, run_id: str, policy: ResolvedPolicy, stamp: datetime) -> None:
        """Opens the record with what is known before any capture."""
        engine = self._engine
        device, self._nvml, doubt = current_device(engine.device)
        floor_ns, overhead_ns = timer_floor_ns(self._clock), recording_overhead_ns(self._clock)
        environment, notes = collect(device), _notes(engine, doubt)
        self.record = RunRecord(
            run_id=run_id + self._writer.claim(),
            status="partial",
            recorder=engine.recorder.kind,
            started_at=stamp.isoformat(timespec="seconds"),
            config=engine.config,
            config_fingerprint=fingerprint(engine.config, engine.model_config),
            model=engine.model_config,
            plan=plan_record(policy, engine.plan),
            environment=environment,
            timer_floor_ns=floor_ns,
            recording_overhead_ns=overhead_ns,
            notes=notes,
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

    def check_parity(self, keys: Collection[GraphKey] | None = None) -> None:
        """Compares every captured key, or these, with eager and with the reference."""
        checker = ParityChecker(self._engine)
        for index, graph in enumerate(self._graphs):
            if graph.failure is not None or (keys is not None and graph.key not in keys):
                continue
            self._progress(f"parity {index + 1}/{len(self._graphs)} {graph.label}")
            update = {
                "parity": checker.check(graph.key),
                "replays": self._engine.graphs.captured[graph.key].replays,
            }
            self._graphs[index] = graph.model_copy(update=update)
            self.save("partial")

    def score(self, choice: ChosenTask) -> tuple[Scored, ...]:
        """Scores the task eager and by replay; returns both scores, or nothing without a task."""
        self._update(accuracy_note=choice.note)
        if choice.task is None or choice.tokenizer is None:
            return ()
        self._progress(f"task {choice.task.name}, {len(choice.task.items)} items")
        self._engine.live.clear()
        try:
            eager, replay, verdict = score_both(self._engine, choice.tokenizer, choice.task)
        except CgprofError as error:
            if choice.named or not isinstance(error, ConfigError):
                self._fail("task", error)
            else:
                self._update(accuracy_note=f"no task accuracy: {error}")
            return ()
        self._writer.items += [*eager.items, *replay.items]
        self._update(accuracy=(eager.result, replay.result), verdicts=(verdict,))
        self.save("partial")
        return eager, replay

    def check(self, options: CheckOptions, choice: ChosenTask) -> None:
        """Runs every leg, with a fault planted if one is asked for."""
        engine = self._engine
        fault = None if options.plant is None else find_fault(options.plant)
        clean = None
        if fault is not None and choice.task is not None and choice.tokenizer is not None:
            self._progress("task without the fault")
            clean = score_task(engine, choice.tokenizer, choice.task, "replay")
        keys = engine.graphs.keys
        if options.sample:
            keys = sample_keys(keys, engine.config.seed)
        with nullcontext() if fault is None else planted(engine, fault):
            self.check_parity(keys)
            self._progress(f"greedy run of {options.greedy_steps} steps")
            greedy = check_greedy(engine, steps=options.greedy_steps)
            self._progress("weights")
            weights = check_weights(engine)
            scores = self.score(choice)
        engine.runner.decisions.clear()
        legs = leg_colours(self._graphs, greedy, weights)
        self._update(
            check=CheckRecord(
                checked=tuple(str(key) for key in keys),
                captured=len(engine.graphs.keys),
                sample_seed=engine.config.seed if options.sample else None,
                greedy=greedy,
                weights=weights,
                plant=None if fault is None else judge_fault(fault, legs, clean, scores),
            )
        )

    def serve(self) -> None:
        """Serves a short workload, so that the report can say how real steps were decided."""
        engine = self._engine
        engine.live.clear()
        engine.runner.decisions.clear()
        self._progress("serving a short workload")
        try:
            serve(engine, workload(engine.config, engine.model_config))
        except CgprofError as error:
            self._fail("serve", error)

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
        self._update(status=status, ranks=(rank,), process_seconds=dict(self._seconds))
        self._writer.write(self.record)

    def _update(self, **fields: object) -> None:
        self.record = self.record.model_copy(update=fields)

    def _fail(self, where: str, error: CgprofError) -> None:
        failure = Failure(where=where, error=type(error).__name__, message=str(error))
        self._update(failures=(*self.record.failures, failure))


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
