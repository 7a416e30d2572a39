"""One run under way: its legs over one engine, and its record, saved after every step of them."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from cgprof.accuracy.choice import CheckOptions, ChosenTask, sample_keys
from cgprof.accuracy.faults import find_fault, planted
from cgprof.accuracy.greedy import check_greedy
from cgprof.accuracy.parity import ParityChecker
from cgprof.accuracy.result import Scored
from cgprof.accuracy.score import score_both, score_task
from cgprof.accuracy.sensitivity import judge_fault, leg_colours
from cgprof.accuracy.weights import check_weights
from cgprof.cost.insight import look_inside
from cgprof.engine.engine import serve
from cgprof.engine.worker import Engine
from cgprof.engine.workload import workload
from cgprof.errors import CgprofError, ConfigError
from cgprof.fresh.afresh import measure_afresh
from cgprof.measure.capture_times import describe_parts, seconds_by_kind, seconds_by_part
from cgprof.measure.captures import CapturePoints, capture_keys, memory_totals, stream_names
from cgprof.measure.clock import Clock, clock_for, timer_floor_ns
from cgprof.measure.company import agreed, decisions, gathered, own_part, required, vetoes
from cgprof.measure.kept import Kept
from cgprof.measure.launch import recording_overhead_ns
from cgprof.measure.memory import MemoryReader
from cgprof.measure.nvml import NvmlDevice
from cgprof.measure.outside import count_outside
from cgprof.measure.profile import profile_key, profile_round_robin, repeat_slow
from cgprof.measure.progress import Progress
from cgprof.measure.shortage import with_final_words
from cgprof.measure.worth import weigh_overlap, with_expert_times
from cgprof.record.graph import GraphRecord
from cgprof.record.scores import AccuracyResult, CheckRecord
from cgprof.record.store import NoFolder, RunWriter
from cgprof.record.types import Failure, RankRecord, RunRecord
from cgprof.shapes import GraphKey

_NO_PEERS_AFRESH = (
    "no graph was measured alone and no eager work compared: a fresh process has no other ranks"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTools:
    """What a job works with."""

    engine: Engine
    writer: RunWriter | NoFolder
    progress: Progress
    nvml: NvmlDevice | None
    kept: Kept
    started_s: float  # time.monotonic when the process began the run


class Job:
    """One run under way."""

    def __init__(self, tools: JobTools, record: RunRecord) -> None:
        """Opens the folder with what is known before any capture."""
        self._engine = tools.engine
        self._writer = tools.writer
        self._progress = tools.progress
        self._nvml = tools.nvml
        self._kept = tools.kept
        self._started_s = tools.started_s
        self._clock: Clock = clock_for(tools.engine.device)
        self._graphs: list[GraphRecord] = []
        self._seconds: dict[str, float] = {}
        self._others: tuple[RankRecord, ...] = ()
        self._left_out: Mapping[str, str] = {}  # label -> why a key is not captured
        self._found: dict[str, object] = {}  # fields of the rank's record, beside its graphs
        self._saving_s = 0.0
        self._writer.samples = tools.kept.samples
        self._writer.items = list(tools.kept.items)
        self.record = record.model_copy(
            update={
                "run_id": record.run_id + self._writer.claim(),
                "timer_floor_ns": timer_floor_ns(self._clock),
                "recording_overhead_ns": recording_overhead_ns(self._clock),
                "accuracy": tools.kept.accuracy,
                "verdicts": tools.kept.verdicts,
            }
        )
        self._seconds["start to engine ready"] = time.monotonic() - self._started_s
        self.save("partial")

    @property
    def failed(self) -> bool:
        """Whether a key, or anything outside the keys, failed."""
        return bool(self.record.failures) or any(graph.failure for graph in self._graphs)

    def capture(self) -> None:
        """Captures every planned key with memory readings around each."""
        engine = self._engine
        reader = MemoryReader(engine.device, self._nvml, stream_names(engine))
        points = CapturePoints()
        self._left_out = points.left_out
        begun_s, saving_s = time.monotonic(), self._saving_s
        self._progress.stage("capture", len(engine.plan.keys))
        for graph in capture_keys(
            engine, reader, points, lambda key: self._progress.step(str(key))
        ):
            if not self._graphs:
                self._seconds["start to first captured key"] = time.monotonic() - self._started_s
            self._graphs.append(self._kept.complete(agreed(self._engine, graph)))
            self.save("partial")
        self._graphs = with_final_words(self._graphs, points.shortages)
        saving_s = self._saving_s - saving_s
        self._seconds["capture with memory readings"] = time.monotonic() - begun_s - saving_s
        self._seconds["capture: first reading"] = points.first_reading_s
        parts = seconds_by_part([one.times for one in self._graphs if one.times])
        self._seconds |= {f"capture: {name}": seconds for name, seconds in parts.items()}
        self._seconds |= seconds_by_kind(self._graphs)
        self._progress.say(describe_parts(parts))
        self._found |= {
            "totals": memory_totals(engine, points, self._graphs),
            "left_out": points.left_out,
        }
        self._others = gathered(self._engine, self._rank_record(with_decisions=True))
        self.save("partial")

    def profile(self) -> None:
        """Times every captured key, then all of them in turn, and looks inside."""
        self._time_launches()
        if self.record.config.microbatch.worth and self.record.worth is None:
            self._weigh_overlap()
        self._look_inside()
        self._trace_experts()
        counted = count_outside(self._engine, self._graphs)
        self._graphs = [self._with_replays(graph) for graph in counted]
        self._others = gathered(self._engine, self._rank_record(with_decisions=True))
        self.save("partial")

    def _time_launches(self) -> None:
        todo = [
            index
            for index, graph in enumerate(self._graphs)
            if graph.failure is None and graph.replay is None
        ]
        self._progress.stage("profile", len(todo))
        for index in todo:
            graph = self._graphs[index]
            self._progress.step(graph.label)
            self._graphs[index] = required(
                self._engine,
                profile_key(self._engine, graph, self._clock, self._writer.samples, self._nvml),
            )
            self.save("partial")
        self._repeat_slow()
        ready = [graph for graph in self._graphs if graph.failure is None]
        if not all(graph.round_robin for graph in ready):
            self._progress.say(f"profile {len(ready)} keys in turn")
            self._writer.samples.keep(lambda _, phase: phase != "round-robin")
            self._graphs = profile_round_robin(
                self._engine, self._graphs, self._clock, self._writer.samples
            )
            self.save("partial")

    def _repeat_slow(self) -> None:
        """Times keys again beside which the host was slow."""
        samples, say = self._writer.samples, self._progress.say
        for again in repeat_slow(self._engine, self._graphs, self._clock, samples, self._nvml, say):
            self._graphs = [again if one.key == again.key else one for one in self._graphs]
            self.save("partial")

    def _look_inside(self) -> None:
        """Costs of the replay call and contents of the graphs; traces, so after all timing."""
        try:
            for found in look_inside(
                self._engine, self._graphs, self._clock, self._writer.samples, self._progress
            ):
                self._writer.nodes, self._writer.timelines = found.nodes, found.timelines.table
                self._found |= {
                    "contents": found.contents,
                    "replay_costs": found.replay_costs,
                    "launch_model": found.launch_model,
                    "timelines": found.timelines.replays,
                    "notes": (*found.notes, *found.timelines.notes),
                }
                self.save("partial")
        except CgprofError as error:
            self._fail_alone("costs and contents", error)

    def measure_afresh(self) -> None:
        """Gives the device back, and measures graphs alone in fresh processes; the last leg."""
        engine = self._engine
        if engine.recorder.kind == "tape":
            return
        if engine.ranks is not None:
            self._found["notes"] = (
                *self._rank_record(with_decisions=False).notes,
                _NO_PEERS_AFRESH,
            )
            return
        keys = engine.graphs.keys
        contents = self._rank_record(with_decisions=False).contents
        engine.release()
        found = measure_afresh(
            self.record.config, self.record.model, keys, contents, self._progress.say
        )
        self._found |= {
            "stand_alone": found.stand_alone,
            "node_model": found.node_model,
            "against_eager": found.against_eager or {},
            "notes": (*self._rank_record(with_decisions=False).notes, *found.notes),
        }
        self.save("partial")

    def _weigh_overlap(self) -> None:
        """Times steps plain and split; before anything is traced, which slows launches."""
        self._progress.say("is DBO worth it: steps plain and split, with and without exchange")
        try:
            worth = weigh_overlap(
                self._engine,
                self._clock,
                lambda case: self._progress.say(f"{case.kind} of {case.num_tokens} tokens"),
            )
        except CgprofError as error:
            self._fail_alone("dbo worth", error)
            return
        self._update(worth=worth)
        self.save("partial")

    def _trace_experts(self) -> None:
        worth = self.record.worth
        if worth is None or worth.process_id != os.getpid():
            return
        try:
            self._update(worth=with_expert_times(self._engine, worth))
        except CgprofError as error:
            self._fail_alone("expert matmuls", error)

    def check_parity(self, keys: Collection[GraphKey] | None = None) -> None:
        """Compares every captured key, or these, with eager and with the reference."""
        checker = ParityChecker(self._engine)
        todo = [
            index
            for index, graph in enumerate(self._graphs)
            if graph.failure is None and not graph.parity and (keys is None or graph.key in keys)
        ]
        self._progress.stage("parity", len(todo))
        for index in todo:
            graph = self._graphs[index]
            self._progress.step(graph.label)
            update = {"parity": checker.check(graph.key), "parity_process_id": os.getpid()}
            self._graphs[index] = self._with_replays(graph.model_copy(update=update))
            self.save("partial")
        self._others = gathered(self._engine, self._rank_record(with_decisions=True))

    def score(self, choice: ChosenTask) -> tuple[Scored, ...]:
        """Scores the task eager and by replay; returns both scores, or nothing without a task.

        Scores that are kept are not made again, and not returned.
        """
        self._update(accuracy_note=choice.note)
        if choice.task is None or choice.tokenizer is None or self.record.accuracy:
            return ()
        self._progress.say(f"task {choice.task.name}, {len(choice.task.items)} items")
        self._engine.live.clear()
        try:
            eager, replay, verdict = score_both(self._engine, choice.tokenizer, choice.task)
        except CgprofError as error:
            if choice.named or not isinstance(error, ConfigError):
                self._fail_alone("task", error)
            else:
                self._update(accuracy_note=f"no task accuracy: {error}")
            return ()
        self._writer.items += [*eager.items, *replay.items]
        self._update(
            accuracy=(_by_this_process(eager.result), _by_this_process(replay.result)),
            verdicts=(verdict,),
        )
        self.save("partial")
        return eager, replay

    def check(self, options: CheckOptions, choice: ChosenTask) -> None:
        """Runs every leg, with a fault planted if one is asked for."""
        engine = self._engine
        fault = None if options.plant is None else find_fault(options.plant)
        clean = None
        if fault is not None and choice.task is not None and choice.tokenizer is not None:
            self._progress.say("task without the fault")
            clean = score_task(engine, choice.tokenizer, choice.task, "replay")
        keys = engine.graphs.keys
        if options.sample:
            keys = sample_keys(keys, engine.config.seed)
        with nullcontext() if fault is None else planted(engine, fault):
            self.check_parity(keys)
            self._progress.say(f"greedy run of {options.greedy_steps} steps")
            greedy = check_greedy(engine, steps=options.greedy_steps)
            self._progress.say("weights")
            weights = check_weights(engine)
            scores = self.score(choice)
        engine.runner.forget_counts()
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
        engine.runner.forget_counts()
        self._progress.say("serving a short workload")
        try:
            serve(engine, own_part(engine, workload(engine.config, engine.model_config)))
        except CgprofError as error:
            self._fail_alone("serve", error)
        self._others = gathered(self._engine, self._rank_record(with_decisions=True))

    def save(self, status: str) -> None:
        """Rewrites the folder."""
        begun_s = time.monotonic()
        rank = self._rank_record(with_decisions=status != "partial")
        self._seconds["writing the run folder"] = self._saving_s
        ranks = (rank, *self._others)
        self._update(status=status, ranks=ranks, process_seconds=dict(self._seconds))
        self._writer.write(self.record)
        self._saving_s += time.monotonic() - begun_s

    def _rank_record(self, *, with_decisions: bool) -> RankRecord:
        ranks = self._engine.ranks
        kept = [one for one in self._kept.rest(self._graphs) if one.label not in self._left_out]
        record = RankRecord(
            rank=0 if ranks is None else ranks.rank,
            graphs=(*self._graphs, *kept),
            decisions=decisions(self._engine) if with_decisions else (),
            vetoes=vetoes(self._engine) if with_decisions else (),
        )
        return record.model_copy(update=self._found)

    def _with_replays(self, graph: GraphRecord) -> GraphRecord:
        """The record with this process's replays, and those that were kept with its timings."""
        captured = self._engine.graphs.captured.get(graph.key)
        if captured is None or graph.failure is not None:
            return graph
        kept = self._kept.graphs.get(graph.key)
        before = kept.replays if kept and kept.timing_process_id == graph.timing_process_id else 0
        return graph.model_copy(update={"replays": before + captured.replays})

    def _update(self, **fields: object) -> None:
        self.record = self.record.model_copy(update=fields)

    def _fail_alone(self, where: str, error: CgprofError) -> None:
        """Keeps the error, unless other ranks wait for this one in the step that it left."""
        if self._engine.ranks is not None:
            raise error
        failure = Failure(where=where, error=type(error).__name__, message=str(error))
        self._update(failures=(*self.record.failures, failure))


def describe_kept(kept: Kept, process_ids: Sequence[int]) -> str:
    """Returns the note of a resumed run: who ran before, and what of it was kept."""
    graphs = kept.graphs.values()
    parts = [
        f"timings of {len(graphs)} keys",
        f"parity of {sum(bool(graph.parity) for graph in graphs)}",
        "accuracy" if kept.accuracy else "no accuracy",
    ]
    earlier = ", ".join(map(str, process_ids))
    return (
        f"resumed by process {os.getpid()} after {earlier or 'an unknown one'}: kept "
        f"{', '.join(parts)}; captured again and read memory in this process"
    )


def _by_this_process(result: AccuracyResult) -> AccuracyResult:
    return result.model_copy(update={"process_id": os.getpid()})
