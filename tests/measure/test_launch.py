import gc

import numpy as np
import pytest

from cgprof.measure.launch import Turn, recording_overhead_ns, round_robin, sample_steps
from cgprof.measure.stopping import CountRule
from tests.support.stepping import (
    STAGES,
    ScriptedClock,
    ScriptedRunner,
    decision_for,
    full_key,
    step_of,
)


def _sample(runner, clock, count=5, **options):
    return sample_steps(runner, step_of(4), clock, CountRule(count), **options)


def test_sample_steps_times_each_stage_apart():
    clock = ScriptedClock()
    samples = _sample(ScriptedRunner(clock), clock)
    for stage, cost in STAGES.items():
        assert getattr(samples, f"{stage}_ns").tolist() == [cost] * 5
    assert samples.device_ns is None
    assert samples.stopped_by == "count"


def test_sample_steps_shows_two_more_milliseconds_of_preparing_in_prepare_only():
    clock, slow_clock = ScriptedClock(), ScriptedClock()
    plain = _sample(ScriptedRunner(clock), clock).stats()
    slow = _sample(ScriptedRunner(slow_clock, prepare=200 + 2_000_000), slow_clock).stats()
    grown = {
        name: getattr(slow, name).median_ns - getattr(plain, name).median_ns for name in STAGES
    }
    assert grown == {"decide": 0, "prepare": 2_000_000, "launch": 0, "finish": 0, "wait": 0}
    assert plain.step.median_ns == sum(STAGES.values())
    assert slow.step.median_ns - plain.step.median_ns == 2_000_000


def test_sample_steps_keeps_device_marks_and_rule_out_of_the_timed_stages():
    clock = ScriptedClock()
    _sample(ScriptedRunner(clock), clock, count=1)
    start = clock.log.index("decide") - 2
    one_step = [
        "read",
        "read",
        "decide",
        "read",
        "prepare",
        "read",
        "begin",
        "read",
        "launch",
        "read",
    ]
    one_step += ["end", "read", "finish", "read", "wait", "read"]
    assert clock.log[start : start + len(one_step)] == one_step


def test_sample_steps_reports_device_time_of_the_span():
    clock = ScriptedClock(has_device=True)
    samples = _sample(ScriptedRunner(clock), clock)
    assert samples.device_ns.tolist() == [STAGES["launch"]] * 5
    assert samples.stats().device.median_ns == STAGES["launch"]


def test_device_time_of_a_step_is_read_while_the_next_one_runs_and_of_the_last_at_the_end():
    clock = ScriptedClock(has_device=True)
    costs = iter([100, 300, 200])
    samples = _sample(ScriptedRunner(clock, launch=lambda key: next(costs)), clock, count=3)
    assert samples.device_ns.tolist() == [100, 300, 200]
    seen = [name for name in clock.log if name in ("begin", "end", "device", "finish", "wait")]
    first = ["begin", "end", "finish", "wait"]
    later = ["begin", "end", "device", "finish", "wait"]
    assert seen == [*first, *later, *later, "device"]


def test_turns_of_a_round_keep_their_device_times_apart():
    clock = ScriptedClock(has_device=True)
    runner = ScriptedRunner(clock, launch=lambda key: 1000 * key.num_tokens)
    turns = [Turn(step=step_of(size), decision=decision_for(full_key(size))) for size in (4, 2)]
    series = round_robin(runner, turns, clock, rounds=3)
    assert [one.device_ns.tolist() for one in series] == [[4000] * 3, [2000] * 3]


def test_sample_steps_launches_only_after_the_step_before_was_waited_for():
    clock = ScriptedClock()
    runner = ScriptedRunner(clock)
    _sample(runner, clock)
    assert runner.most_in_flight == 1
    assert clock.log.index("synchronize") < clock.log.index("decide")


def test_sample_steps_times_launches_on_an_idle_queue_however_long_the_device_works():
    """A full queue makes the call wait for the device: that time must not pass for launching."""
    clock = ScriptedClock()
    runner = ScriptedRunner(
        clock, launch=lambda key: 3_000 if runner.in_flight == 0 else 900_000, wait=900_000
    )
    samples = _sample(runner, clock, count=50)
    assert samples.launch_ns.tolist() == [3_000] * 50
    assert samples.wait_ns.tolist() == [900_000] * 50


def test_sample_steps_throws_warmup_away():
    clock = ScriptedClock()
    costs = iter([9_000_000, 8_000_000, 3_000, 3_000, 3_000])
    runner = ScriptedRunner(clock, launch=lambda key: next(costs))
    samples = _sample(runner, clock, count=3, warmup=2)
    assert samples.launch_ns.tolist() == [3_000] * 3


def test_sample_steps_forces_a_decision_and_else_follows_the_engine():
    clock = ScriptedClock()
    runner = ScriptedRunner(clock)
    eager = full_key(4).as_eager()
    _sample(runner, clock, count=1, decision=decision_for(eager))
    _sample(runner, clock, count=1)
    assert runner.launched == [eager, full_key(4)]


@pytest.mark.parametrize("enabled", [True, False])
def test_sample_steps_keeps_the_collector_off_and_leaves_it_as_it_was(enabled):
    seen = []
    clock = ScriptedClock()

    def launch(key):
        seen.append(gc.isenabled())
        if len(seen) == 3:
            raise RuntimeError("planted")
        return 1

    was = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        with pytest.raises(RuntimeError, match="planted"):
            _sample(ScriptedRunner(clock, launch=launch), clock)
        assert gc.isenabled() is enabled
    finally:
        gc.enable() if was else gc.disable()
    assert seen == [False] * 3


def test_round_robin_takes_turns_and_keeps_samples_per_turn():
    clock = ScriptedClock()
    runner = ScriptedRunner(clock, launch=lambda key: 1000 * key.num_tokens)
    keys = [full_key(4), full_key(2), full_key(1)]
    turns = [Turn(step=step_of(key.num_tokens), decision=decision_for(key)) for key in keys]
    series = round_robin(runner, turns, clock, rounds=3)
    assert runner.launched == keys * 4  # one round is thrown away
    assert [samples.launch_ns.tolist() for samples in series] == [
        [4000] * 3,
        [2000] * 3,
        [1000] * 3,
    ]


def test_recording_overhead_is_the_reads_of_one_step():
    clock = ScriptedClock(read_cost=7)
    assert recording_overhead_ns(clock) == 10 * 7  # eight marks and the read that ends it


def test_samples_stats_summarise_the_arrays():
    clock = ScriptedClock()
    costs = iter([100, 300, 200, 400, 9_000])
    samples = _sample(ScriptedRunner(clock, launch=lambda key: next(costs)), clock)
    launch = samples.stats().launch
    assert (launch.count, launch.median_ns, launch.min_ns) == (5, 300, 100)
    assert launch.iqr_ns == 200
    assert launch.p95_ns == round(float(np.percentile([100, 200, 300, 400, 9_000], 95)))
    assert launch.outliers == 1
    assert launch.noise == pytest.approx(200 / 300)
    assert launch.stopped_by == "count"
