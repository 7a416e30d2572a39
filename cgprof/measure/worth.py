"""Times steps plain and split, with their exchange and without, by turns; no profiler is on."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cgprof.config.schema import All2AllBackend
from cgprof.engine.live import spread
from cgprof.errors import CaptureError
from cgprof.measure.clock import Clock
from cgprof.measure.expert_time import expert_matmul_ns
from cgprof.measure.launch import Turn, round_robin
from cgprof.measure.samples import Samples
from cgprof.measure.weighing import StepSamples, slowest, weigh
from cgprof.measure.worth_cases import WorthCase, decode_cases, prefill_cases, spread_cases
from cgprof.parallel.agree import agree_success
from cgprof.record.worth import WorthRecord, WorthRow
from cgprof.shapes import RuntimeMode, StepDecision
from cgprof.stats.quantiles import IntSamples

if TYPE_CHECKING:
    from cgprof.engine.types import Step
    from cgprof.engine.worker import BareSteps, Engine

LOOPBACK = "loopback"
_ONE_RANK = "one rank: the exchange is a loopback, so there is nothing to hide"
_EXACT = "the exact exchange has no step without it: its sizes travel as well"
_NO_DEVICE = "a CPU has no device time: expert matmuls cannot be timed apart"
_NO_KERNELS = "the profiler saw no kernel of the expert matmuls"
_LEAST_ROUNDS = 20


def weigh_overlap(
    engine: Engine, clock: Clock, progress: Callable[[WorthCase], None]
) -> WorthRecord:
    """Returns what splitting costs and hides for decode and prefill steps of each size.

    Where few tokens are spread, also what that gains over the fall-back.
    Ranks call it together; all get the same record. Afterwards no request is live.
    """
    config = engine.config
    cases, notes = _cases(engine)
    rows = []
    for case in cases:
        progress(case)
        rows.append(weigh(case, _samples(engine, case, clock), config.seed))
    engine.live.clear()
    return WorthRecord(
        exchange=LOOPBACK if _is_alone(engine) else config.parallel.all2all_backend.value,
        num_ranks=1 if engine.ranks is None else engine.ranks.size,
        rows=tuple(rows),
        notes=notes,
        process_id=os.getpid(),
    )


def with_expert_times(engine: Engine, worth: WorthRecord) -> WorthRecord:
    """Returns the comparison with the device time of the expert matmuls of each step.

    It traces, which slows launches: after all that times them. Ranks call it together; afterwards
    no request is live.
    """
    cases, _ = _cases(engine)
    rows = [_with_experts(engine, case, row) for case, row in zip(cases, worth.rows, strict=True)]
    engine.live.clear()
    return worth.model_copy(update={"rows": tuple(rows)})


def _cases(engine: Engine) -> tuple[list[WorthCase], tuple[str, ...]]:
    """The steps that are compared, and what is left out and why."""
    config, keys = engine.config, engine.graphs.keys
    num_ranks = 1 if engine.ranks is None else engine.ranks.size
    decodes, odd_sizes = decode_cases(keys, config)
    spreads, unchanged = spread_cases(decodes, keys, config, num_ranks)
    prefills, limits = prefill_cases(config, engine.pool.num_blocks - 1)
    return [*decodes, *spreads, *prefills], (*odd_sizes, *unchanged, *limits)


def _is_alone(engine: Engine) -> bool:
    return engine.ranks is None or engine.ranks.size == 1


def _samples(engine: Engine, case: WorthCase, clock: Clock) -> StepSamples:
    step = _live_step(engine, case)
    if _is_alone(engine):
        return _timed(engine, case, step, clock, None, _ONE_RANK)
    if engine.config.parallel.all2all_backend is All2AllBackend.EXACT:
        return _timed(engine, case, step, clock, None, _EXACT)
    with engine.without_exchange() as bare:
        for decision in _decisions(engine, case):
            engine.keep_routing(bare, step, decision)
        problem = _capture_bare(engine, bare, case)
        return _timed(engine, case, step, clock, None if problem else bare, problem)


def _capture_bare(engine: Engine, bare: BareSteps, case: WorthCase) -> str:
    """Captures what the case replays; returns why a rank could not, or nothing."""
    problem: str | None = None
    try:
        for key in (case.plain, case.split):
            if key.mode is not RuntimeMode.NONE:
                engine.capture_bare(bare, key)
    except CaptureError as error:
        problem = str(error)
    assert engine.ranks is not None  # a step without exchange is of several ranks
    problems = agree_success(engine.ranks, problem, what=f"{case.split} without exchange")
    return "; ".join(f"rank {rank}: {text}" for rank, text in problems.items())


def _timed(
    engine: Engine,
    case: WorthCase,
    step: Step,
    clock: Clock,
    bare: BareSteps | None,
    note: str,
) -> StepSamples:
    """Takes turns; the experts of a bare step are told what the same step's exchange brought."""
    turns = []
    for decision in _decisions(engine, case):
        turns.append(Turn(step=step, decision=decision))
        if bare is not None:
            turns.append(Turn(step=step, decision=decision, runner=bare.runner))
    config = engine.config.measure
    rounds = min(config.max_samples, max(config.min_samples, _LEAST_ROUNDS))
    series = round_robin(engine.runner, turns, clock, rounds)
    times = _over_ranks(engine, [_after_votes(samples) for samples in series])
    if bare is None:
        return StepSamples(plain=times[0], split=times[1], bare_note=note)
    return StepSamples(
        plain=times[0], plain_bare=times[1], split=times[2], split_bare=times[3], bare_note=note
    )


def _decisions(engine: Engine, case: WorthCase) -> tuple[StepDecision, StepDecision]:
    """What every rank is forced to, plain and split."""
    return case.decided or (engine.decision_for(case.plain), engine.decision_for(case.split))


def _live_step(engine: Engine, case: WorthCase) -> Step:
    """This rank's own step."""
    if case.kind == "prefill":
        lens = spread(case.num_tokens, case.num_reqs)
        return engine.live.fill([0] * case.num_reqs, lens, engine.input_seed)
    step = engine.live_step(case.plain)
    if engine.ranks is None or not case.tokens_per_rank:
        return step
    return engine.live.step([1] * case.tokens_per_rank[engine.ranks.rank])


def _after_votes(samples: Samples) -> IntSamples:
    """Whole steps but for the votes, where a rank that is early waits for the others."""
    total: IntSamples = (
        samples.decide_ns
        + samples.prepare_ns
        + samples.launch_ns
        + samples.finish_ns
        + samples.wait_ns
    )
    return total


def _over_ranks(engine: Engine, mine: Sequence[IntSamples]) -> list[IntSamples]:
    if engine.ranks is None:
        return list(mine)
    gathered = engine.ranks.gather_objects([samples.tolist() for samples in mine])
    of_ranks = [np.array(one, np.int64) for one in gathered]
    return [slowest([one[index] for one in of_ranks]) for index in range(len(mine))]


def _with_experts(engine: Engine, case: WorthCase, row: WorthRow) -> WorthRow:
    """Traces the expert matmuls; the slowest rank's count."""
    if engine.device.type != "cuda":
        return row.model_copy(update={"experts_note": _NO_DEVICE})
    step = _live_step(engine, case)
    mine = [expert_matmul_ns(_runner_of(engine, step, one)) for one in _decisions(engine, case)]
    gathered = [mine] if engine.ranks is None else engine.ranks.gather_objects(mine)
    most = [_largest(one) for one in zip(*_rows(gathered), strict=True)]
    if None in most:
        return row.model_copy(update={"experts_note": _NO_KERNELS})
    return row.model_copy(update={"experts_plain_ns": most[0], "experts_split_ns": most[1]})


def _runner_of(engine: Engine, step: Step, decision: StepDecision) -> Callable[[], None]:
    def once() -> None:
        prepared = engine.runner.prepare(step, decision)
        engine.runner.finish(prepared, engine.runner.launch(prepared)).wait()

    return once


def _rows(gathered: Sequence[object]) -> list[list[int | None]]:
    return [list(one) for one in gathered if isinstance(one, list)]


def _largest(times: Sequence[int | None]) -> int | None:
    known = [time for time in times if time is not None]
    return max(known) if len(known) == len(times) else None
