"""Engines on several ranks: each gives what it would give alone, whatever the others have to do."""

import pytest
import torch

from cgprof.config.schema import All2AllBackend
from cgprof.engine.types import IDLE_STEP
from cgprof.errors import RankError
from cgprof.graphs.dispatch import eager_key
from cgprof.shapes import CapturePolicy, RuntimeMode
from tests.support.builders import build_engine, tiny_run
from tests.support.ranks import run_ranks

ROWS = 8
# Decode tokens of each rank; with 3 keys of 2, 4 and 8 tokens and twins from 4 tokens on.
LOADS = {
    2: [(8, 8), (3, 8), (8, 5), (0, 4), (7, 0), (1, 1), (4, 2), (6, 7)],
    4: [(8, 8, 8, 8), (0, 3, 0, 8), (5, 6, 7, 8), (1, 0, 0, 0), (4, 4, 3, 4)],
}
CAPTURED = [All2AllBackend.ALLGATHER_REDUCESCATTER, All2AllBackend.ALL_TO_ALL]


def make_run(size, backend, *, dbo, policy=CapturePolicy.FULL, **parallel):
    run = tiny_run(policy, sizes=(2, 4, 8), dbo=dbo)
    settings = {"data_parallel_size": size, "all2all_backend": backend, **parallel}
    changed = run.parallel.model_copy(update=settings)
    return run.model_copy(update={"parallel": changed})


def last_rows(engine, step, decision):
    """Hidden states [t, D] of a step's real tokens, and its sampled tokens."""
    prepared = engine.runner.prepare(step, decision)
    engine.output.fill_(float("nan"))
    hidden = engine.runner.launch(prepared)
    tokens = engine.runner.finish(prepared, hidden).wait().tolist()
    return hidden[: step.shape.num_tokens].clone(), tokens


def steps_beside_one_rank(ranks, run, loads):
    """Each load's decision, how far this rank's rows are from a lone engine's, and its replays."""
    engine = build_engine(run, ranks=ranks)
    alone = build_engine(tiny_run(CapturePolicy.NONE, sizes=None))
    found = []
    try:
        for one in (engine, alone):
            with one.active():
                for key in one.plan.keys:
                    one.capture(key, lambda phase: None)
                one.live.fill([5 + 3 * row for row in range(ROWS)], [1] * ROWS, engine.input_seed)
        for load in loads:
            count = load[ranks.rank]
            with engine.active():
                step = engine.live.step([1] * count) if count else IDLE_STEP
                decision = engine.runner.decide(step)
                hidden, tokens = last_rows(engine, step, decision)
                again, _ = last_rows(engine, step, engine.decision_for(decision.key.as_eager()))
            difference, same = 0.0, True
            if count:
                with alone.active():
                    step = alone.live.step([1] * count)
                    wanted, expected = last_rows(alone, step, alone.decision_for(eager_key(count)))
                difference, same = float((hidden - wanted).abs().max()), tokens == expected
            found.append((str(decision.key), decision.reason, difference, same))
            assert torch.equal(hidden, again), f"{load}: the replay differs from eager"
        replays = {str(key): graph.replays for key, graph in engine.graphs.captured.items()}
    finally:
        engine.close()
        alone.close()
    return found, replays


def check(size, run):
    results = run_ranks(size, steps_beside_one_rank, run, LOADS[size])
    decisions = [[(key, reason) for key, reason, _, _ in found] for found, _ in results]
    assert all(one == decisions[0] for one in decisions), decisions
    for found, _ in results:
        for load, (key, _, difference, same) in zip(LOADS[size], found, strict=True):
            assert difference < 1e-5, (load, key, difference)
            assert same, (load, key)
    assert all(replays == results[0][1] for _, replays in results)
    return decisions[0], results[0][1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", CAPTURED)
@pytest.mark.parametrize("dbo", [False, True])
def test_two_ranks_give_what_each_gives_alone(backend, dbo):
    decisions, replays = check(2, make_run(2, backend, dbo=dbo, verify_decisions=True))
    keys = [key for key, _ in decisions]
    if not dbo:
        assert keys == [
            "FULL-8x8",
            "FULL-8x8",
            "FULL-8x8",
            "FULL-4x4",
            "FULL-8x8",
            "FULL-2x2",
            "FULL-4x4",
            "FULL-8x8",
        ]
        return
    assert keys[0] == "FULL-8x8q1-mb2"
    assert decisions[1] == ("FULL-8x8", "graph")  # 3 tokens are below the threshold
    assert keys[2] == "FULL-8x8q1-mb2"
    assert replays["FULL-8x8q1-mb2"] >= 3


@pytest.mark.ranks(4)
@pytest.mark.long
@pytest.mark.parametrize("backend", CAPTURED)
def test_four_ranks_give_what_each_gives_alone(backend):
    check(4, make_run(4, backend, dbo=True))


@pytest.mark.ranks(2)
def test_exact_exchange_gives_what_each_rank_gives_alone():
    run = make_run(2, All2AllBackend.EXACT, dbo=False, policy=CapturePolicy.NONE)
    decisions, _ = check(2, run)
    assert {key for key, _ in decisions} == {"NONE-8", "NONE-4", "NONE-7", "NONE-1"}


def decide_with_one_key_less(ranks, run):
    engine = build_engine(run, ranks=ranks)
    try:
        with engine.active():
            for key in engine.plan.keys:
                engine.capture(key, lambda phase: None)
            if ranks.rank == 1:
                engine.graphs.drop(engine.graphs.keys[0])
            engine.live.fill([5] * ROWS, [1] * ROWS, 0)
            try:
                engine.runner.decide(engine.live.step([1] * ROWS))
            except RankError as error:
                return str(error)
        return None
    finally:
        engine.close()


@pytest.mark.ranks(2)
def test_key_that_one_rank_lacks_is_named_before_anything_is_launched():
    run = make_run(2, All2AllBackend.ALL_TO_ALL, dbo=False)
    for told in run_ranks(2, decide_with_one_key_less, run, spoils=True):
        assert "unlike keys, settings or code" in told


def decide_otherwise_on_one_rank(ranks, run):
    engine = build_engine(run, ranks=ranks)
    try:
        with engine.active():
            engine.live.fill([5] * ROWS, [1] * ROWS, 0)
            if ranks.rank == 1:
                peers = engine.runner._peers
                exchange = peers.check
                peers.check = lambda decision: exchange(
                    engine.decision_for(eager_key(decision.key.num_tokens + 1))
                )
            try:
                engine.runner.decide(engine.live.step([1] * ROWS))
            except RankError as error:
                return str(error)
        return None
    finally:
        engine.close()


@pytest.mark.ranks(2)
def test_divergent_decision_is_an_error_where_decisions_are_verified():
    run = make_run(2, All2AllBackend.ALL_TO_ALL, dbo=False, verify_decisions=True)
    for told in run_ranks(2, decide_otherwise_on_one_rank, run, spoils=True):
        assert "decisions differ" in told
        assert RuntimeMode.NONE.name in told
