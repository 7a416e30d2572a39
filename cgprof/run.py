"""Whole runs, each in one screen: plan, build, capture, profile or check; all in one folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from cgprof.accuracy.choice import CheckOptions, choose_task
from cgprof.config.compat import check
from cgprof.config.load import fingerprint, load_run
from cgprof.config.schema import ModelConfig, RunConfig
from cgprof.engine.room import choose_device
from cgprof.engine.worker import Engine
from cgprof.errors import RankError, UnsupportedError, is_lost_stream
from cgprof.graphs.modes import ResolvedPolicy
from cgprof.graphs.plan import CapturePlan
from cgprof.graphs.plan_record import plan_record, resolve_plan
from cgprof.job import Job, JobTools, describe_kept
from cgprof.measure.device import current_device
from cgprof.measure.kept import Kept, keep, nothing_kept
from cgprof.measure.progress import Progress
from cgprof.parallel.agree import agree_equal
from cgprof.parallel.failure import report_error
from cgprof.parallel.grid import Rank
from cgprof.parallel.groups import Ranks, collective_cause, connect
from cgprof.record.environment import collect
from cgprof.record.place import Environment, RunProcess
from cgprof.record.resume import (
    require_resumable,
    require_same_place,
    require_same_request,
)
from cgprof.record.store import NoFolder, RunWriter, read_items, read_run, read_sample_table
from cgprof.record.types import SCHEMA_VERSION, RunRecord

Say = Callable[[str], None]


def plan_run(run: RunConfig, model: ModelConfig) -> tuple[ResolvedPolicy, CapturePlan]:
    """Returns the policy that the run really has and the plan that follows from it.

    Raises:
        ConfigError: A setting or a combination is refused.
    """
    check(run, model)
    return resolve_plan(run, model)


def capture_run(
    run: RunConfig,
    model: ModelConfig,
    *,
    output_dir: Path | None,
    force: bool,
    progress: Say,
    rank: Rank | None = None,
) -> tuple[Path | None, RunRecord]:
    """Captures, profiles and checks every planned key; the folder is rewritten after each of them.

    Several ranks run this side by side; rank 0 keeps the folder, the others return None for it.

    Raises:
        CgprofError: The run is refused, or the device cannot hold it. A key that fails is a
            record with its failure.
    """
    order = _Order(run, model, "capture", rank=rank)
    writer = order.new_writer(output_dir, force)
    record = _capture(order, writer, progress)
    return _folder(writer), record


def resume_run(
    folder: Path, asked: tuple[RunConfig, ModelConfig] | None, *, progress: Say
) -> RunRecord | None:
    """Goes on with a run that was cut off or failed; None for one that is complete.

    Captures anew and reads memory in this process; keeps finished timings, parity and accuracy.
    `asked` must be what the run was asked for; None takes that from its record.

    Raises:
        CgprofError: As `capture_run`; also a folder that is no such run, or is being written, or
            whose run was another or elsewhere.
    """
    read_run(folder)
    with RunWriter(folder, resume=True) as writer:
        writer.claim()
        record = read_run(folder)  # again: another process may have gone on with it meanwhile
        require_resumable(folder, record)
        if record.status == "complete":
            return None
        if record.config.parallel.data_parallel_size > 1:
            problem = "a run on several ranks cannot be resumed; start a new one"
            raise UnsupportedError("--resume", problem)
        run, model = asked or _recorded_request(record)
        policy, plan = plan_run(run, model)
        require_same_request(folder, record, run, model, plan_record(policy, plan))
        kept = keep(record, read_sample_table(folder), read_items(folder))
        order = _Order(record.config, model, "capture", earlier=record, kept=kept)
        return _capture(order, writer, progress)


def check_run(
    run: RunConfig,
    model: ModelConfig,
    options: CheckOptions,
    *,
    output_dir: Path | None,
    force: bool,
    progress: Say,
    rank: Rank | None = None,
) -> tuple[Path | None, RunRecord]:
    """Captures the plan without timing it and checks it: parity, greedy runs, weights, a task.

    Raises:
        CgprofError: The run is refused, or the device cannot hold it. A key that fails is a
            record with its failure.
    """
    options.validate(run, model)
    choice = choose_task(
        model, options.task, kind=options.task_kind, limit=options.limit, seed=run.seed
    )
    order = _Order(run, model, "check", rank=rank)
    writer = order.new_writer(output_dir, force)
    with _started(order, writer, progress) as job:
        job.capture()
        job.check(options, choice)
    return _folder(writer), job.record


class _Order:
    """What a run is to do, and what an earlier process has done of it."""

    def __init__(
        self,
        run: RunConfig,
        model: ModelConfig,
        command: Literal["capture", "check"],
        *,
        earlier: RunRecord | None = None,
        kept: Kept | None = None,
        rank: Rank | None = None,
    ) -> None:
        self.rank = rank
        self.run = run
        self.model = model
        self.command = command
        self.earlier = earlier
        self.kept = kept or nothing_kept()
        self.policy, self.plan = plan_run(run, model)
        self.stamp = datetime.now(UTC)
        self.name = f"{self.stamp:%Y%m%dT%H%M%SZ}_{model.name}_{self.policy.policy.value}"

    def new_writer(self, output_dir: Path | None, force: bool) -> RunWriter | NoFolder:
        """Returns the writer of a run that begins here."""
        if self.rank is not None and self.rank.rank:
            return NoFolder()
        folder = output_dir or Path("runs") / self.name
        return RunWriter(folder, force=force, numbered=output_dir is None)

    def first_record(
        self, engine: Engine, environment: Environment, doubt: str | None
    ) -> RunRecord:
        """Returns what is known before any capture; a resumed run keeps its name and its start."""
        this_process = RunProcess(
            process_id=os.getpid(),
            hostname=environment.hostname,
            started_at=self.stamp.isoformat(timespec="seconds"),
        )
        notes = _notes(engine, doubt)
        if self.earlier is not None:
            before = self.earlier.processes
            note = describe_kept(self.kept, [one.process_id for one in before])
            return self.earlier.model_copy(
                update={
                    "schema_version": SCHEMA_VERSION,
                    "status": "partial",
                    "environment": environment,
                    "processes": (*before, this_process),
                    "notes": (*notes, note),
                    "failures": (),
                }
            )
        return RunRecord(
            run_id=self.name,
            status="partial",
            recorder=engine.recorder.kind,
            capture_error_mode=engine.recorder.capture_error_mode,
            started_at=this_process.started_at,
            config=self.run,
            config_fingerprint=fingerprint(self.run, self.model),
            model=self.model,
            plan=plan_record(self.policy, self.plan),
            environment=environment,
            notes=notes,
            command=self.command,
            processes=(this_process,),
        )


def _folder(writer: RunWriter | NoFolder) -> Path | None:
    return writer.path if isinstance(writer, RunWriter) else None


def _capture(order: _Order, writer: RunWriter | NoFolder, say: Say) -> RunRecord:
    choice = choose_task(order.model, seed=order.run.seed)
    with _started(order, writer, say) as job:
        job.capture()
        job.profile()
        if order.run.accuracy.parity:
            job.check_parity()
        job.score(choice)
        job.serve()
        job.measure_afresh()
    return job.record


@contextmanager
def _started(order: _Order, writer: RunWriter | NoFolder, say: Say) -> Iterator[Job]:
    """Builds the engine and opens the folder; at the end the record says how it went."""
    started_s = time.monotonic()
    with (
        writer,
        Progress(say) as progress,
        _joined(order) as ranks,
        ExitStack() as after,
        _told(ranks),
    ):
        writer.reserve()
        device = choose_device(order.run.measure.device) if ranks is None else ranks.device
        found, nvml, doubt = current_device(device)
        environment = collect(found)
        if order.earlier is not None and isinstance(writer, RunWriter):
            recorder = "cuda" if device.type == "cuda" else "tape"
            require_same_place(writer.path, order.earlier, recorder, environment)
        if ranks is not None:
            _require_alike(ranks, order, environment)
        progress.say(f"building {order.model.name}")
        engine = Engine(order.run, order.model, order.plan, ranks)
        after.callback(engine.close)
        with engine.active():
            tools = JobTools(
                engine=engine,
                writer=writer,
                progress=progress,
                nvml=nvml,
                kept=order.kept,
                started_s=started_s,
            )
            job = Job(tools, order.first_record(engine, environment, doubt))
            yield job
            job.save("failed" if job.failed else "complete")


@contextmanager
def _joined(order: _Order) -> Iterator[Ranks | None]:
    """Joins the other ranks for the time of a run."""
    if order.rank is None:
        yield None
        return
    ranks = connect(order.rank, choose_device(order.run.measure.device), order.run.parallel)
    try:
        yield ranks
    except BaseException:
        ranks.abandon()
        raise
    ranks.close()


@contextmanager
def _told(ranks: Ranks | None) -> Iterator[None]:
    """Tells the launcher of an error before anything is closed, which may wait for other ranks.

    Raises:
        RankError: A collective failed; names the ranks that do not answer.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and is_lost_stream(error):
            raise
        failed = None if isinstance(error, RankError) else collective_cause(error)
        if ranks is None or failed is None:
            report_error(error)
            raise
        lost = ranks.lost(failed)
        report_error(lost)
        raise lost from error


def _require_alike(ranks: Ranks, order: _Order, environment: Environment) -> None:
    """Ranks that run unlike programs would meet in unlike collectives, or wait for ever."""
    agree_equal(ranks, "config", order.run)
    agree_equal(ranks, "model", {**order.model.model_dump(mode="json"), "directory": None})
    agree_equal(ranks, "plan", [str(key) for key in order.plan.keys])
    versions = {"cgprof": environment.code, "torch": environment.torch}
    agree_equal(ranks, "versions", versions)


def _recorded_request(record: RunRecord) -> tuple[RunConfig, ModelConfig]:
    """What a run was asked for, with its model card and weights read again."""
    settings = record.config.model_dump(mode="json", exclude_none=True)
    name = record.model.directory or record.config.model.name
    _, model = load_run(None, name, settings)
    return record.config, model


def _notes(engine: Engine, doubt: str | None) -> tuple[str, ...]:
    notes = []
    if engine.microbatches is not None and engine.ranks is None:
        notes.append(
            "one device: the expert exchange is a loopback on the communication stream, for plain "
            "keys as well; there was nothing to hide"
        )
    if engine.ranks is not None:
        notes.append(f"votes travel by {engine.ranks.rounds.carrier}")
    if engine.recorder.kind == "tape":
        notes.append("recorder tape: times are CPU stand-in times, not a GPU's")
    return (*notes, doubt) if doubt else tuple(notes)
