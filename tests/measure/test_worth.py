"""Steps of real engines, by a clock that only collectives and its own reads move."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cgprof.config.schema import All2AllBackend
from cgprof.errors import ReplayError
from cgprof.graphs.dispatch import eager_key
from cgprof.measure.clock import CpuClock, clock_for
from cgprof.measure.worth import weigh_overlap, with_expert_times
from cgprof.shapes import CapturePolicy, DecisionReason
from tests.support.builders import captured_engine, tiny_model, tiny_run
from tests.support.graphs import decode_key
from tests.support.ranks import run_ranks

LAYERS = tiny_model().num_layers
READS = 5  # of a step after its votes, one a stage
COLLECTIVE_NS = 1_000
ROUNDS = 20
CAPTURED = (All2AllBackend.ALLGATHER_REDUCESCATTER, All2AllBackend.ALL_TO_ALL)


class CountingClock(TorchDispatchMode):
    """Time moves by each read, and by each collective of the thread that entered it."""

    def __init__(self, read_ns):
        super().__init__()
        self.now, self._read_ns = 0, read_ns

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.now += COLLECTIVE_NS
        return func(*args, **(kwargs or {}))

    def read_ns(self):
        self.now += self._read_ns
        return self.now

    def new_span(self):
        return CpuClock().new_span()

    def synchronize(self):
        pass


def make_run(backend, policy=CapturePolicy.FULL_DECODE_ONLY, size=2, **limits):
    run = tiny_run(policy, sizes=(2, 4, 8), dbo=True, **limits)
    settings = {"data_parallel_size": size, "all2all_backend": backend}
    return run.model_copy(update={"parallel": run.parallel.model_copy(update=settings)})


def spreading(run, *, on=True):
    changed = run.microbatch.model_copy(update={"spread_real_tokens": on})
    return run.model_copy(update={"microbatch": changed})


def weighed(ranks, run):
    """The record, the steps that were announced, and what a twin gives before and afterwards."""
    with captured_engine(run, ranks=ranks) as engine:
        keys, outputs = engine.graphs.keys, [replayed(engine)]
        seen = []
        clock = CountingClock(100 if ranks is None or ranks.rank == 0 else 200)
        with clock:
            worth = weigh_overlap(engine, clock, lambda case: seen.append(str(case.split)))
            worth = with_expert_times(engine, worth)
        assert engine.graphs.keys is keys
        assert not engine.table.requests
        outputs.append(replayed(engine))
        assert torch.equal(*outputs)
        assert engine._dispatcher.kept is None
    return worth, seen


def replayed(engine):
    """Hidden states of the largest key, from a context that is computed anew."""
    key = engine.graphs.keys[-1] if engine.graphs.keys else None
    engine.live.clear()
    if key is None:
        step = engine.live.fill([5] * 8, [1] * 8, 0)
        decision = engine.runner.decide(step)
    else:
        step, decision = engine.live_step(key), engine.decision_for(key)
    prepared = engine.runner.prepare(step, decision)
    hidden = engine.runner.launch(prepared)
    engine.runner.finish(prepared, hidden).wait()
    return hidden.clone()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", CAPTURED)
def test_ranks_find_what_their_collectives_cost_and_leave_no_trace(backend):
    results = run_ranks(2, weighed, make_run(backend))
    worth, seen = results[0]
    other = results[1][0]
    assert [row.model_dump() for row in worth.rows] == [row.model_dump() for row in other.rows]
    assert seen == ["FULL-4x4q1-mb2", "FULL-8x8q1-mb2", "NONE-24-mb2", "NONE-48-mb2"]
    assert (worth.exchange, worth.num_ranks) == (backend.value, 2)
    base = READS * 200  # of the rank whose reads take longest
    for row in worth.rows[:2]:
        assert row.plain.count == ROUNDS
        assert row.plain.median_ns == base + 2 * LAYERS * COLLECTIVE_NS
        assert row.split.median_ns == base + 4 * LAYERS * COLLECTIVE_NS
        assert row.plain_bare.median_ns == row.split_bare.median_ns == base
        assert row.exchange_ns == 2 * LAYERS * COLLECTIVE_NS
        assert row.hidden.value == -1  # two exchanges, none of them hidden
        assert row.verdict == "not worth it"
        assert "CPU" in row.experts_note
    for row in worth.rows[2:]:
        assert row.plain.median_ns == base + 2 * LAYERS * COLLECTIVE_NS
        assert row.plain_bare.median_ns == base


def weighed_spread(ranks, run, read_ns=100):
    """The record, how often each decision was launched, and the loads that ranks voted on."""
    with captured_engine(run, ranks=ranks) as engine:
        with CountingClock(read_ns) as clock:
            worth = weigh_overlap(engine, clock, lambda case: None)
        launched = dict(engine.runner.decisions)
        loads = {
            tuple(vote.shape.num_tokens for vote in votes): known.decision
            for votes, known in engine.runner._known.items()
        }
    return worth, launched, loads


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", CAPTURED)
def test_ranks_time_spread_steps_against_what_they_would_fall_back_to(backend):
    results = run_ranks(2, weighed_spread, spreading(make_run(backend)))
    plain, twin = decode_key(8), decode_key(8, num_microbatches=2)
    for worth, launched, loads in results:
        assert worth.rows == results[0][0].rows
        assert [(row.kind, row.num_tokens) for row in worth.rows] == [
            ("decode", 4),
            ("decode", 8),
            ("spread", 8),
            ("prefill", 24),
            ("prefill", 48),
        ]
        row = worth.rows[2]
        assert (row.plain_label, row.split_label) == (str(plain), str(twin))
        assert row.fewest_tokens == 4
        assert row.plain.count == row.split.count == ROUNDS
        base = READS * 100
        assert row.plain.median_ns == base + 2 * LAYERS * COLLECTIVE_NS
        assert row.split.median_ns == base + 4 * LAYERS * COLLECTIVE_NS
        assert row.plain_bare.median_ns == row.split_bare.median_ns == base
        assert row.verdict == "not worth it"
        # Both once more than the rounds, and neither for anything else.
        assert launched[plain, DecisionReason.EMPTY_MICROBATCH] == ROUNDS + 1
        assert launched[twin, DecisionReason.SPREAD] == ROUNDS + 1
        # The real votes of that load lead where the timed steps were forced to.
        assert (loads[8, 4].key, loads[8, 4].reason) == (twin, DecisionReason.SPREAD)
        assert (4, 4) in loads
        assert (4, 2) not in loads
        assert [note for note in worth.notes if note.startswith("spread of 4 tokens, 2 on")]


@pytest.mark.ranks(2)
def test_nothing_is_spread_without_the_setting():
    run = spreading(make_run(All2AllBackend.ALL_TO_ALL, max_num_batched_tokens=16), on=False)
    for worth, launched, loads in run_ranks(2, weighed_spread, run):
        assert [row.kind for row in worth.rows] == ["decode", "decode"]
        assert not {reason for _, reason in launched} & {
            DecisionReason.SPREAD,
            DecisionReason.EMPTY_MICROBATCH,
        }
        assert (8, 4) not in loads
        assert "spread" not in " ".join(worth.notes)


def spread_on_gpus(ranks, run):
    """The row of the spread steps, and how often each decision was launched."""
    with captured_engine(run, ranks=ranks) as engine:
        worth = weigh_overlap(engine, clock_for(engine.device), lambda case: None)
        worth = with_expert_times(engine, worth)
        launched = dict(engine.runner.decisions)
    return [row for row in worth.rows if row.kind == "spread"], launched


@pytest.mark.multigpu(2)
@pytest.mark.parametrize("backend", CAPTURED)
def test_gpus_time_spread_steps_with_and_without_their_exchange(backend):
    run = spreading(make_run(backend, device="cuda", max_num_batched_tokens=16))
    results = run_ranks(2, spread_on_gpus, run, device="cuda", limit_s=180.0)
    plain, twin = decode_key(8), decode_key(8, num_microbatches=2)
    for rows, launched in results:
        (row,) = rows
        assert rows == results[0][0]
        assert (row.num_tokens, row.fewest_tokens) == (8, 4)
        assert (row.plain_label, row.split_label) == (str(plain), str(twin))
        assert row.plain.count == row.split.count == ROUNDS
        assert row.bare_note == ""
        assert row.plain_bare.median_ns > 0
        assert row.split_bare.median_ns > 0
        # Those that are traced afterwards count as well.
        assert launched[plain, DecisionReason.EMPTY_MICROBATCH] > ROUNDS
        assert launched[twin, DecisionReason.SPREAD] > ROUNDS


@pytest.mark.ranks(2)
def test_exact_exchange_says_why_there_is_no_step_without_it():
    run = make_run(All2AllBackend.EXACT, policy=CapturePolicy.NONE)
    worth, _ = run_ranks(2, weighed, run)[0]
    assert [(row.kind, row.num_tokens) for row in worth.rows] == [("prefill", 24), ("prefill", 48)]
    assert all(row.plain_bare is None and "exact" in row.bare_note for row in worth.rows)


def test_one_rank_has_nothing_to_hide():
    worth, _ = weighed(None, spreading(make_run(All2AllBackend.ALL_TO_ALL, size=1)))
    assert (worth.exchange, worth.num_ranks) == ("loopback", 1)
    assert [row.num_tokens for row in worth.rows] == [4, 8, 24, 48]
    for row in worth.rows:
        assert row.plain.median_ns == READS * 100
        assert row.hidden is None
        assert row.plain_bare is None
        assert "nothing to hide" in row.hidden_note
        assert row.verdict == "undecided"


def fail_bare_on_one_rank(ranks, run):
    with captured_engine(run, ranks=ranks) as engine:
        capture_bare = engine.capture_bare

        def with_less_room(bare, key):
            bare.runner._output = bare.runner._output[:4]
            capture_bare(bare, key)

        if ranks.rank == 1:
            engine.capture_bare = with_less_room
        clock = CountingClock(100)
        return weigh_overlap(engine, clock, lambda case: None)


@pytest.mark.ranks(2)
def test_bare_capture_that_fails_on_one_rank_is_told_on_all():
    run = make_run(All2AllBackend.ALL_TO_ALL, max_num_batched_tokens=16)
    for worth in run_ranks(2, fail_bare_on_one_rank, run):
        small, large = worth.rows
        assert small.plain_bare is not None
        assert large.plain_bare is None
        assert large.bare_note.startswith("rank 1: ")
        assert "FULL-8x8q1 failed" in large.bare_note
        assert large.plain.count == ROUNDS


def test_step_without_exchange_is_refused_unless_its_routing_was_kept():
    with captured_engine(make_run(All2AllBackend.ALL_TO_ALL, size=1)) as engine:
        step = engine.live.fill([5] * 4, [1] * 4, 0)
        decision = engine.decision_for(eager_key(4))
        with engine.without_exchange() as bare:
            prepared = bare.runner.prepare(step, decision)
            with pytest.raises(ReplayError, match=r"NONE-4.*no routing was kept"):
                bare.runner.launch(prepared)
            engine.keep_routing(bare, step, decision)
            assert bare.runner.launch(bare.runner.prepare(step, decision)).isfinite().all()
