"""Unlike loads, small pools and many sizes on several ranks: each rank's output stays its own."""

import random

import pytest
import torch

from cgprof.batch.request import Request
from cgprof.config.schema import All2AllBackend
from cgprof.engine.engine import serve
from cgprof.engine.room import Room
from cgprof.engine.types import IDLE_STEP
from cgprof.errors import RankError
from cgprof.parallel.agree import agree_success
from cgprof.shapes import CapturePolicy, RuntimeMode
from tests.support.builders import build_engine, tiny_run
from tests.support.ranks import run_ranks

ROWS = 8
PROMPT = (3, 1, 4, 1, 5)


def make_run(*, sizes=(1, 2, 4, 8), dbo=False, size=2, **parallel):
    run = tiny_run(CapturePolicy.FULL_DECODE_ONLY, sizes=sizes, dbo=dbo)
    settings = {
        "data_parallel_size": size,
        "all2all_backend": All2AllBackend.ALL_TO_ALL,
        **parallel,
    }
    changed = run.parallel.model_copy(update=settings)
    return run.model_copy(update={"parallel": changed})


def capture_all(engine):
    for key in engine.plan.keys:
        engine.capture(key, lambda phase: None)


def serve_equal_prompts(ranks, run, counts):
    """The distinct outputs of this rank and the steps it took, by load."""
    engine = build_engine(run, ranks=ranks)
    found = []
    try:
        with engine.active():
            capture_all(engine)
            for load in counts:
                engine.runner.decisions.clear()
                requests = [
                    Request(request_id=str(index), prompt=PROMPT, max_new_tokens=6)
                    for index in range(load[ranks.rank])
                ]
                outputs = serve(engine, requests)
                modes = [
                    key.mode for (key, _), n in engine.runner.decisions.items() for _ in range(n)
                ]
                found.append((set(outputs.values()), len(outputs), sorted(modes)))
    finally:
        engine.close()
    return found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dbo", [False, True])
def test_busy_rank_beside_an_idle_one_gives_what_it_gives_beside_a_busy_one(dbo):
    busy, idle = run_ranks(2, serve_equal_prompts, make_run(dbo=dbo), [(8, 0), (8, 8)])
    (outputs, count, modes), (beside_busy, _, _) = busy
    assert count == 8
    assert len(outputs) == 1
    assert outputs == beside_busy
    assert idle[0][:2] == (set(), 0)
    assert idle[0][2] == modes  # it took part in every step
    assert RuntimeMode.FULL in modes
    assert idle[1][0] == outputs


def idle_inputs(ranks, run):
    """How many tokens of an idle rank's step are real, and of its key."""
    engine = build_engine(run, ranks=ranks)
    try:
        with engine.active():
            capture_all(engine)
            engine.live.fill([5] * ROWS, [1] * ROWS, engine.input_seed)
            step = IDLE_STEP if ranks.rank else engine.live.step([1] * ROWS)
            decision = engine.runner.decide(step)
            prepared = engine.runner.prepare(step, decision)
            engine.runner.finish(prepared, engine.runner.launch(prepared)).wait()
            padding = engine.buffers.device_fields.is_padding[: decision.key.num_tokens]
            return str(decision.key), decision.tokens_per_rank, int(padding.sum())
    finally:
        engine.close()


@pytest.mark.ranks(2)
def test_tokens_of_an_idle_rank_are_padding():
    busy, idle = run_ranks(2, idle_inputs, make_run())
    assert busy == ("FULL-8x8q1", busy[1], 0)
    assert idle == ("FULL-8x8q1", busy[1], 8)


def replay_in_random_order(ranks, run, rounds):
    """The first replay that differs from the eager pass of its key, if one does."""
    engine = build_engine(run, ranks=ranks)
    try:
        with engine.active():
            capture_all(engine)
            engine.live.fill([5 + row for row in range(ROWS)], [1] * ROWS, engine.input_seed)
            keys = engine.graphs.keys
            steps = {key: engine.live.step([1] * key.num_tokens) for key in keys}

            def run_key(key, eager):
                step = steps[key]
                asked = engine.decision_for(key.as_eager() if eager else key)
                prepared = engine.runner.prepare(step, asked)
                engine.output.fill_(float("nan"))
                return engine.runner.launch(prepared)[: step.shape.num_tokens].clone()

            expected = {key: run_key(key, eager=True) for key in keys}
            rng = random.Random(7)  # the same order on all ranks
            for number in range(rounds):
                key = rng.choice(keys)
                if not torch.equal(run_key(key, eager=False), expected[key]):
                    return f"replay {number}, {key}"
            return sorted(key.num_tokens for key in keys)
    finally:
        engine.close()


@pytest.mark.ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", [All2AllBackend.ALL_TO_ALL, All2AllBackend.ALLGATHER_REDUCESCATTER]
)
def test_sizes_replayed_in_random_order_equal_eager(backend):
    found = run_ranks(2, replay_in_random_order, make_run(all2all_backend=backend), 200)
    assert found == [[1, 2, 4, 8]] * 2


def decide_beside(ranks, run, loads):
    """Key and reason of every load."""
    engine = build_engine(run, ranks=ranks)
    try:
        with engine.active():
            capture_all(engine)
            engine.live.fill([5] * ROWS, [1] * ROWS, 0)
            found = []
            for load in loads:
                decision = engine.runner.decide(engine.live.step([1] * load[ranks.rank]))
                found.append((str(decision.key), decision.reason.value))
            return found
    finally:
        engine.close()


@pytest.mark.ranks(2)
def test_twin_without_tokens_for_its_last_microbatch_on_one_rank_is_refused_on_both():
    loads = [(3, 8), (4, 8), (5, 8), (8, 8)]
    found = run_ranks(2, decide_beside, make_run(sizes=(8,), dbo=True), loads)
    assert found[0] == found[1]
    assert [key for key, _ in found[0]] == ["FULL-8x8q1"] * 2 + ["FULL-8x8q1-mb2"] * 2
    assert found[0][1][1] == "empty-microbatch"


@pytest.mark.ranks(2)
def test_one_token_a_rank_is_never_split():
    run = make_run(sizes=(1, 2, 4), dbo=True)
    microbatch = run.microbatch.model_copy(update={"decode_token_threshold": 2})
    run = run.model_copy(update={"microbatch": microbatch})
    found = run_ranks(2, decide_beside, run, [(1, 1), (1, 2), (2, 2), (3, 3)])
    assert found[0] == found[1]
    keys = [key for key, _ in found[0]]
    assert keys == ["FULL-1x1q1", "FULL-2x2q1", "FULL-2x2q1-mb2", "FULL-4x4q1-mb2"]


@pytest.mark.ranks(2)
def test_ranks_of_7_and_64_tokens_take_the_larger_size_both():
    run = tiny_run(sizes=(8, 64), max_num_seqs=64)
    run = run.model_copy(update={"parallel": make_run().parallel})
    found = run_ranks(2, decide_beside_64, run)
    assert found == ["FULL-64x64q1"] * 2


def decide_beside_64(ranks, run):
    engine = build_engine(run, ranks=ranks)
    try:
        with engine.active():
            capture_all(engine)
            engine.live.fill([5] * 64, [1] * 64, 0)
            return str(engine.runner.decide(engine.live.step([1] * (7, 64)[ranks.rank])).key)
    finally:
        engine.close()


def replay_a_tail(ranks, run):
    """Lengths of a step of 2 requests in a graph of 4, and whether it equals the eager pass."""
    engine = build_engine(run, ranks=ranks)
    try:
        with engine.active():
            capture_all(engine)
            engine.live.fill([16, 24, 9, 9], [1] * 4, engine.input_seed)
            step = engine.live.step([1, 1])
            decision = engine.runner.decide(step)
            outputs = []
            for key in (decision.key, decision.key.as_eager()):
                prepared = engine.runner.prepare(step, engine.decision_for(key))
                engine.output.fill_(float("nan"))
                outputs.append(engine.runner.launch(prepared)[:2].clone())
            lengths = engine.buffers.device_fields.seq_lens[:4].tolist()
            return str(decision.key), lengths, torch.equal(*outputs)
    finally:
        engine.close()


@pytest.mark.ranks(2)
def test_two_requests_in_a_graph_of_four_have_neutral_padding_rows():
    found = run_ranks(2, replay_a_tail, make_run(sizes=(4,)))
    assert found == [("FULL-4x4q1", [17, 25, 0, 0], True)] * 2


def build_with_a_small_pool(ranks, run, blocks):
    cache_blocks = Room.cache_blocks
    if ranks.rank == 1:
        Room.cache_blocks = lambda self: blocks
    try:
        build_engine(run, ranks=ranks).close()
    except RankError as error:
        return error.rank, error.problem
    finally:
        Room.cache_blocks = cache_blocks
    return None


@pytest.mark.ranks(2)
def test_rank_whose_kv_pool_is_too_small_is_named_on_all_ranks():
    found = run_ranks(2, build_with_a_small_pool, make_run(), 2)
    assert found[0] == found[1]
    rank, problem = found[0]
    assert rank == 1
    assert problem.startswith("has room for 2 KV blocks, one request of max_model_len 320 need 21;")


def fail_inside_an_exchange(ranks):
    """Rank 1 fails; rank 0 waits for it in a collective that it left."""
    try:
        if ranks.rank:
            agree_success(ranks, "planted", what="a key")
        else:
            torch.distributed.all_reduce(torch.ones(1), group=ranks.captured)
    except (RankError, RuntimeError) as error:
        return str(error)
    return None


@pytest.mark.ranks(2)
def test_failure_that_leaves_the_others_in_an_exchange_is_told_with_its_cause():
    parallel = make_run(replay_timeout_s=2, startup_timeout_s=50).parallel
    found = run_ranks(2, fail_inside_an_exchange, parallel=parallel, spoils=True)
    assert found[1] == "rank 1: planted; then the others did not go on"
