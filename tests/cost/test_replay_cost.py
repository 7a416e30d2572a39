import gc
from array import array

import numpy as np
import pytest
import torch

from cgprof.cost.replay_cost import _Rounds, replay_costs
from cgprof.cost.traced import traced_launches, with_traced
from cgprof.measure.clock import CpuClock, clock_for
from cgprof.measure.outside import GRAPH, trace_launches
from cgprof.record.samples import SampleSink
from tests.support.builders import captured_engine, tiny_run
from tests.support.ranks import run_ranks
from tests.support.records import graph_record
from tests.support.runs import failed_graph
from tests.support.stepping import ScriptedClock


def run_of(samples, **changes):
    run = tiny_run(**changes)
    return run.model_copy(
        update={"measure": run.measure.model_copy(update={"replay_samples": samples})}
    )


def records_of(engine):
    return [graph_record().model_copy(update={"key": k, "label": str(k)}) for k in engine.plan.keys]


def test_rounds_alternate_the_clocks_and_time_only_the_last_call_of_a_busy_queue():
    clock = ScriptedClock()
    cpu = array("q", [0])

    def replay():
        clock.log.append("replay")
        clock.advance(100)
        cpu[0] += 60

    def read_cpu():
        clock.log.append("read cpu")
        return cpu[0]

    rounds = _Rounds(replay, clock, busy=True, read_cpu_ns=read_cpu)
    rounds.run()
    wall, thread = ["read", "replay", "read"], ["read cpu", "replay", "read cpu"]
    assert clock.log == [
        *("synchronize", *wall, "synchronize", *thread),
        *("synchronize", "replay", *wall, "synchronize", "replay", *thread),
    ]
    rounds.forget()
    rounds.run()
    rounds.run()
    for columns in rounds.columns().values():
        assert columns["launch_ns"].tolist() == [100, 100]
        assert columns["launch_cpu_ns"].tolist() == [60, 60]
    cost = rounds.cost("count", "")
    assert (cost.busy.median_ns, cost.busy_cpu.median_ns, cost.idle.count) == (100, 60, 2)


def test_tape_costs_every_captured_key_by_itself_and_has_no_busy_queue():
    sink = SampleSink()
    with captured_engine(run_of(5, sizes=(2, 4), dbo=True)) as engine:
        keys, seen = engine.graphs.keys, []
        before = [engine.graphs.captured[key].replays for key in keys]
        failed = failed_graph(keys[0]).model_copy(update={"label": "failed"})
        records = [*records_of(engine), failed]
        costs = replay_costs(engine, records, CpuClock(), sink, seen.append)
        after = [engine.graphs.captured[key].replays for key in keys]
    assert any(key.is_twin for key in keys)
    assert list(costs) == [str(key) for key in keys] == [str(key) for key in seen]
    # One round is thrown away; a round is one call by each clock.
    assert [n - m for n, m in zip(after, before, strict=True)] == [12] * len(keys)
    for cost in costs.values():
        assert (cost.idle.count, cost.idle_cpu.count, cost.idle.stopped_by) == (5, 5, "count")
        assert cost.idle.min_ns > 0
        assert (cost.busy, cost.busy_cpu) == (None, None)
        assert "done the work" in cost.busy_note
    rows = sink.table().to_pandas()
    assert set(rows["phase"]) == {"idle"}
    assert rows.groupby("key").size().tolist() == [5] * len(keys)
    assert rows["launch_cpu_ns"].notna().all()
    first = costs[str(keys[0])]
    of_first = rows[rows["key"] == str(keys[0])]
    assert round(np.median(of_first["launch_ns"])) == first.idle.median_ns
    assert round(np.median(of_first["launch_cpu_ns"])) == first.idle_cpu.median_ns


def test_replays_work_on_the_inputs_of_a_full_step():
    with captured_engine(run_of(2, sizes=(4,))) as engine:
        (key,) = engine.graphs.keys
        step = engine.live_step(key)
        prepared = engine.runner.prepare(step, engine.decision_for(key.as_eager()))
        eager = engine.runner.launch(prepared).clone()
        engine.graphs.poison(key)
        engine.live.clear()
        replay_costs(engine, records_of(engine), CpuClock(), SampleSink())
        assert torch.equal(engine.output[: key.num_tokens], eager)


def test_no_samples_asked_for_means_no_replay():
    with captured_engine(run_of(0, sizes=(2,))) as engine:
        assert replay_costs(engine, records_of(engine), CpuClock(), SampleSink()) == {}
        assert engine.graphs.captured[engine.graphs.keys[0]].replays == 0


def test_second_measurement_replaces_the_samples_of_the_first_and_no_others():
    sink = SampleSink()
    with captured_engine(run_of(3, sizes=(2,))) as engine:
        (key,) = engine.graphs.keys
        sink.append(str(key), "hot", {"launch_ns": np.array([7], np.int64)})
        for _ in range(2):
            replay_costs(engine, records_of(engine), CpuClock(), sink)
    assert sink.table().to_pandas()["phase"].tolist() == ["hot", "idle", "idle", "idle"]


@pytest.mark.parametrize(("read_ns", "count"), [(10_000_000, 10), (900_000_000, 5)])
def test_slow_replays_are_sampled_less_often_but_never_too_rarely(read_ns, count):
    """A round of a tape has three reads of this clock: around it, and two of one call."""
    with captured_engine(run_of(50, sizes=(2,))) as engine:
        clock = ScriptedClock(read_cost=read_ns)
        (cost,) = replay_costs(engine, records_of(engine), clock, SampleSink()).values()
    assert (cost.idle.count, cost.idle.stopped_by) == (count, "max_seconds")


def test_garbage_collector_rests_meanwhile():
    states = []

    class Watching(CpuClock):
        def synchronize(self):
            states.append(gc.isenabled())

    assert gc.isenabled()
    with captured_engine(run_of(2, sizes=(2,))) as engine:
        replay_costs(engine, records_of(engine), Watching(), SampleSink())
    assert states
    assert not any(states)
    assert gc.isenabled()


def of_rank(ranks, run):
    with captured_engine(run, ranks=ranks) as engine:
        # Time goes at another speed on each rank.
        clock = ScriptedClock(read_cost=1_000_000 * 400**ranks.rank)
        costs = replay_costs(engine, records_of(engine), clock, SampleSink())
        return {label: cost.idle.count for label, cost in costs.items()}


def test_ranks_replay_equally_often_whatever_time_each_of_them_sees():
    run = run_of(30, sizes=(2, 4))
    parallel = run.parallel.model_copy(update={"data_parallel_size": 2})
    first, second = run_ranks(2, of_rank, run.model_copy(update={"parallel": parallel}))
    assert first == second
    assert set(first.values()) == {10}


@pytest.mark.gpu
def test_replays_of_a_moe_cost_time_on_idle_and_busy_queue_and_cupti_agrees():
    sink = SampleSink()
    with captured_engine(run_of(20, device="cuda", sizes=(2, 8), dbo=True)) as engine:
        clock, records = clock_for(engine.device), records_of(engine)
        costs = replay_costs(engine, records, clock, sink)
        step_ns = 20_000  # of the thread's CPU clock, at most
        for cost in costs.values():
            assert cost.busy_note == ""
            for wall, cpu in ((cost.idle, cost.idle_cpu), (cost.busy, cost.busy_cpu)):
                assert wall.count == cpu.count == 20
                assert wall.min_ns > 0
                assert cpu.median_ns <= 1.5 * wall.median_ns + step_ns
        graph = engine.graphs.captured[engine.graphs.keys[0]]

        def once():
            engine.graphs.replay(graph)
            engine.synchronize()

        for _ in range(2):  # what was left works again, after torch's profiler with its clock too
            traced = traced_launches(engine, records)
            assert not isinstance(traced, str), traced
            assert trace_launches([once]) == [{GRAPH: 1}]
        costs = with_traced(costs, traced)
        for cost in costs.values():
            assert cost.traced.count == 10
            # CUPTI makes launches dearer; the two clocks around one call must agree all the same.
            assert cost.traced.median_ns <= cost.traced_wall.median_ns
            assert cost.traced.median_ns >= 0.3 * cost.traced_wall.median_ns
    assert set(sink.table().to_pandas()["phase"]) == {"idle", "busy"}
