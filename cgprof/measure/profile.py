"""The launches of captured keys: eager, first and hot, key by key, then all keys in turn.

Between the two, hot series that met a slow host are taken again: what a launch takes is the
graph's matter at one pace of the host, and the host's at two.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cgprof.errors import MicrobatchError, ReplayError
from cgprof.measure.clock import Clock
from cgprof.measure.exchange import exchange_traffic
from cgprof.measure.launch import Turn, round_robin, sample_steps
from cgprof.measure.nvml import NvmlDevice
from cgprof.measure.pace import host_pace_ns
from cgprof.measure.sampler import sampled
from cgprof.measure.samples import Samples
from cgprof.measure.stopping import CountRule, NoiseRule, StoppingRule
from cgprof.measure.warnings import (
    bound_by,
    launch_warnings,
    throttle_warnings,
    timing_warnings,
)
from cgprof.record.graph import GraphRecord
from cgprof.record.samples import SampleSink
from cgprof.shapes import GraphKey
from cgprof.stats.pace import slower

if TYPE_CHECKING:
    from cgprof.engine.worker import Engine

# Of a series of replays on several ranks, where no rank may stop before another.
_SAMPLES_OF_RANKS = 15
_LONGEST_REPEAT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hot:
    """Replays of one key again and again, and the slower pace of the host before and after."""

    samples: Samples
    pace_ns: int


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


def repeat_slow(
    engine: Engine,
    records: Sequence[GraphRecord],
    clock: Clock,
    sink: SampleSink,
    nvml: NvmlDevice | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[GraphRecord]:
    """Yields the records that met a slow host and a faster one now, with hot times of the latter.

    The host is slow where `stats.pace` says so of its loop beside all keys. Which series counts is
    chosen by that loop alone, never by the launches. Every pass takes the keys that are still slow,
    of those that this process timed, for a minute at most; ranks, which cannot repeat alone, and
    tapes repeat nothing. Eager and first replays stay what they were. A replay that is refused, or
    whose microbatch raises, fails its key as in `profile_key`. A key may come more than once.
    """
    config, end_s = engine.config.measure, time.monotonic() + _LONGEST_REPEAT_S
    if engine.runner.has_peers or engine.recorder.kind == "tape":
        return
    now = {one.key: one for one in records if one.failure is None and one.host_pace_ns}
    for _ in range(config.slow_host_repeats):
        paces_ns = {key: one.host_pace_ns or 0 for key, one in now.items()}
        slow = slower(paces_ns, min(paces_ns.values(), default=0))
        own = [key for key in slow if now[key].timing_process_id == os.getpid()]
        if not own or time.monotonic() >= end_s:
            break
        say(f"replay {len(own)} keys again, beside which the host was slow")
        for key in own:
            if time.monotonic() >= end_s:
                break
            try:
                with sampled(engine):
                    hot = _replay_hot(engine, key, clock)
            except (ReplayError, MicrobatchError) as error:
                yield now.pop(key).model_copy(update={"failure": str(error)})
                continue
            if hot.pace_ns < paces_ns[key]:
                _replace_hot(sink, str(key), hot.samples)
                again = _with_hot(engine, now[key], hot, nvml)
                update = {"hot_repeats": now[key].hot_repeats + 1}
                now[key] = again.model_copy(update=update)
                yield now[key]


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
        first = sample_steps(engine.runner, step, clock, CountRule(1), decision=replay)
        sink.append(record.label, "first", first.columns())
        hot = _replay_hot(engine, key, clock)
        sink.append(record.label, "hot", hot.samples.columns())
    timed = record.model_copy(
        update={
            "eager": eager.stats(instrumented=_is_instrumented(engine)),
            "first_replay_ns": int(first.launch_ns[0]),
            "experts_hit": experts_hit,
            "exchange_moved_bytes": traffic.moved_bytes,
            "exchange_needed_bytes": traffic.needed_bytes,
            "timing_process_id": os.getpid(),
        }
    )
    return _with_hot(engine, timed, hot, nvml)


def _replace_hot(sink: SampleSink, label: str, samples: Samples) -> None:
    sink.keep(lambda key, phase: (key, phase) != (label, "hot"))
    sink.append(label, "hot", samples.columns())


def _replay_hot(engine: Engine, key: GraphKey, clock: Clock) -> _Hot:
    before_ns = host_pace_ns(clock)
    samples = sample_steps(
        engine.runner,
        engine.live_step(key),
        clock,
        _stopping_rule(engine, eager=False),
        decision=engine.decision_for(key),
        warmup=engine.config.measure.warmup,
    )
    return _Hot(samples=samples, pace_ns=max(before_ns, host_pace_ns(clock)))


def _with_hot(
    engine: Engine, record: GraphRecord, hot: _Hot, nvml: NvmlDevice | None
) -> GraphRecord:
    """The record with these hot times, and what is doubtful in them in place of earlier doubts."""
    eager, replay = record.eager, hot.samples.stats(instrumented=_is_instrumented(engine))
    if eager is None or record.first_replay_ns is None:
        raise ValueError(f"{record.label}: hot replays are read beside eager and first ones")
    noise = engine.config.measure.relative_noise
    doubts = [
        *launch_warnings(eager, replay, record.first_replay_ns, noise),
        *throttle_warnings(() if nvml is None else nvml.slowdowns()),
    ]
    of_times = timing_warnings(record.warnings)
    of_memory = tuple(text for text in record.warnings if text not in of_times)
    return record.model_copy(
        update={
            "replay": replay,
            "host_pace_ns": hot.pace_ns,
            "bound": bound_by(eager, replay),
            "replays": engine.graphs.captured[record.key].replays,
            "warnings": of_memory + tuple(str(doubt) for doubt in doubts),
        }
    )
