"""Twins that replay a few spread tokens: each request gets what it gets one after another."""

import dataclasses

import numpy as np
import pytest
import torch

from cgprof.batch.request import Request
from cgprof.config.schema import All2AllBackend
from cgprof.engine.engine import serve
from cgprof.engine.inputs import CLEAN, PaddingFill
from cgprof.engine.types import IDLE_STEP
from cgprof.graphs.dispatch import eager_key
from cgprof.shapes import CapturePolicy, DecisionReason
from tests.support.builders import build_engine, captured_engine, tiny_run
from tests.support.graphs import decode_key
from tests.support.nearness import References
from tests.support.ranks import run_ranks

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)
SPREAD = DecisionReason.SPREAD
CONTEXTS = [1, 15, 16, 17, 40, 7, 100, 3]
# Padded size, microbatches, tokens, and the rows where these lie.
LAYOUTS = [
    (8, 2, 2, [0, 4]),
    (8, 2, 3, [0, 1, 4]),
    (8, 2, 4, [0, 1, 4, 5]),
    (7, 2, 3, [0, 1, 3]),
    (7, 3, 4, [0, 1, 2, 4]),
    (8, 3, 3, [0, 2, 4]),
    (8, 4, 5, [0, 1, 2, 4, 6]),
]


def spread_run(*, sizes=(8,), spread=True, policy=CapturePolicy.FULL_DECODE_ONLY, **options):
    count = options.pop("count", 2)
    run = tiny_run(
        policy, sizes=sizes, dbo=True, batch_invariant=options.get("device") == "cuda", **options
    )
    changes = {
        "spread_real_tokens": spread,
        "num_microbatches": count,
        "decode_token_threshold": count,
    }
    return run.model_copy(update={"microbatch": run.microbatch.model_copy(update=changes)})


def rows_of(prepared):
    """The output rows of a step's tokens, in the order of its requests."""
    if not prepared.spread:
        return list(range(prepared.step.shape.num_tokens))
    return [row for r in prepared.spread for row in range(r.start, r.start + r.num_tokens)]


def run_rows(engine, step, decision, padding=CLEAN):
    """Hidden states [t, D] and sampled tokens [t] in the order of requests, and rows taken."""
    prepared = engine.runner.prepare(step, decision, padding)
    engine.output.fill_(float("nan"))
    hidden = engine.runner.launch(prepared)
    tokens = engine.runner.finish(prepared, hidden).wait().tolist()
    rows = rows_of(prepared)
    return hidden[rows].clone(), tokens, rows


def filled(engine):
    engine.live.fill(CONTEXTS, [1] * 8, seed=3)
    engine.poison_free_kv()


def same(left, right):
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize(("padded", "count", "tokens", "rows"), LAYOUTS)
@on_devices
def test_spread_replay_is_eager_at_its_layout_and_near_the_plain_step(
    device, padded, count, tokens, rows
):
    with captured_engine(spread_run(device=device, sizes=(padded,), count=count)) as engine:
        filled(engine)
        step = engine.live.step([1] * tokens)
        decision = engine.runner.decide(step)
        twin = decode_key(padded, num_microbatches=count)
        assert (decision.key, decision.reason) == (twin, SPREAD)
        fresh, addresses = engine.kv_cache.clone(), engine.buffers.addresses()

        replayed, sampled, taken = run_rows(engine, step, decision)
        assert taken == rows
        after_replay = engine.kv_cache.clone()
        engine.kv_cache.copy_(fresh)
        eager = dataclasses.replace(decision, key=twin.as_eager())
        by_eager, eager_tokens, _ = run_rows(engine, step, eager)
        assert torch.equal(replayed, by_eager)
        assert sampled == eager_tokens
        assert same(after_replay, engine.kv_cache)

        engine.kv_cache.copy_(fresh)
        plain, plain_tokens, _ = run_rows(engine, step, engine.decision_for(decode_key(padded)))
        torch.testing.assert_close(replayed, plain, atol=1e-5, rtol=1e-4)
        assert sampled == plain_tokens
        written = [(cache != fresh) & ~fresh.isnan() for cache in (after_replay, engine.kv_cache)]
        assert torch.equal(*written)
        torch.testing.assert_close(
            after_replay, engine.kv_cache, atol=1e-5, rtol=1e-4, equal_nan=True
        )
        References(engine).check(step, replayed)
        assert engine.buffers.addresses() == addresses
        assert engine.graphs.captured[twin].replays == 1


@on_devices
def test_gaps_may_hold_anything(device):
    with captured_engine(spread_run(device=device)) as engine:
        filled(engine)
        step = engine.live.step([1] * 3)
        decision = engine.runner.decide(step)
        clean, tokens, _ = run_rows(engine, step, decision)
        cache = engine.kv_cache.clone()
        garbage = PaddingFill(
            input_id=127, position=319, block=int(engine.block_table.array[engine.live._rows[7], 0])
        )
        dirty, dirty_tokens, _ = run_rows(engine, step, decision, garbage)
        assert torch.equal(clean, dirty)
        assert tokens == dirty_tokens
        assert same(cache, engine.kv_cache)


@on_devices
def test_every_padded_element_of_a_spread_step_is_written(device):
    with captured_engine(spread_run(device=device)) as engine:
        filled(engine)
        full = engine.live.step([1] * 8)
        for _ in range(12):  # more than there are staging slots, so that each holds other rows
            engine.runner.prepare(full, engine.decision_for(decode_key(8)))
        step = engine.live.step([1] * 3)
        engine.runner.prepare(step, engine.runner.decide(step))
        engine.synchronize()
        fields = engine.buffers.device_fields
        table = engine.table
        gaps, rows = [2, 3, 5, 6, 7], [0, 1, 4]
        requests = step.rows
        positions = table.num_computed[requests]
        assert fields.is_padding[:8].nonzero().flatten().tolist() == gaps
        assert fields.input_ids[rows].tolist() == table.token_ids[requests, positions].tolist()
        assert fields.positions[rows].tolist() == positions.tolist()
        assert fields.seq_lens[rows].tolist() == (positions + 1).tolist()
        wanted = torch.from_numpy(engine.block_table.array[requests])
        assert torch.equal(fields.block_table[rows].cpu(), wanted)
        block_size = engine.config.limits.block_size
        blocks = wanted.numpy()[np.arange(3), positions // block_size]
        slots = blocks * block_size + positions % block_size
        assert fields.slot_mapping[rows].tolist() == slots.tolist()
        for field, pad in (
            (fields.input_ids, 0),
            (fields.positions, 0),
            (fields.seq_lens, 0),
            (fields.block_table, 0),
            (fields.slot_mapping, -1),
        ):
            assert (field[gaps] == pad).all()
        assert fields.query_start_loc[:9].tolist() == [0, 1, 2, 2, 2, 3, 3, 3, 3]
        assert fields.split_query_start_loc[0, :5].tolist() == [0, 1, 2, 2, 2]
        assert fields.split_query_start_loc[1, :5].tolist() == [0, 1, 1, 1, 1]
        assert fields.split_seq_lens[0, :4].tolist() == [*(positions[:2] + 1).tolist(), 0, 0]
        assert fields.split_seq_lens[1, :4].tolist() == [int(positions[2]) + 1, 0, 0, 0]
        assert fields.sample_rows[:8].tolist() == [0, 1, 4, 0, 0, 0, 0, 0]


@on_devices
def test_sampled_tokens_are_those_of_the_plain_step_in_the_order_of_requests(device):
    with captured_engine(spread_run(device=device)) as engine:
        filled(engine)
        rows = engine.live.step([1] * 4).rows
        engine.table.temperature[rows] = [0.0, 1.0, 0.7, 3.0]
        engine.table.seed[rows] = [1, 2, 3, 4]
        for count in (2, 3, 4):
            step = engine.live.step([1] * count)
            decision = engine.runner.decide(step)
            assert decision.reason is SPREAD
            _, sampled, _ = run_rows(engine, step, decision)
            _, plain, _ = run_rows(engine, step, engine.decision_for(decode_key(8)))
            assert sampled == plain
            assert len(set(plain)) > 1
            prepared = engine.runner.prepare(step, decision)
            scores = engine.runner.logits(prepared, engine.runner.launch(prepared))[:count]
            assert scores[0].argmax().item() == sampled[0]


def requests_for(count, seed, *, temperature=0.0):
    """Some of them end early, so that later steps hold ever fewer."""
    rng = np.random.default_rng(seed)
    return [
        Request(
            request_id=str(index),
            prompt=tuple(rng.integers(0, 128, 3 + 5 * index).tolist()),
            max_new_tokens=max(31 - 4 * index, 2),
            temperature=temperature if index % 2 else 0.0,
            seed=index,
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@on_devices
def test_30_steps_give_the_tokens_of_a_run_without_spreading(device, count, temperature):
    asked = requests_for(8, seed=0, temperature=temperature)
    with captured_engine(spread_run(device=device, spread=False, count=count)) as engine:
        expected = serve(engine, asked)
        reasons = {reason for _, reason in engine.runner.decisions}
        assert DecisionReason.EMPTY_MICROBATCH in reasons
        assert SPREAD not in reasons
    with captured_engine(spread_run(device=device, count=count)) as engine:
        assert serve(engine, asked) == expected
        decisions = engine.runner.decisions
        twin = decode_key(8, num_microbatches=count)
        assert decisions[twin, SPREAD] >= 6
        assert decisions[twin, DecisionReason.GRAPH] >= 6
        assert engine.graphs.captured[twin].replays == sum(
            times for (key, _), times in decisions.items() if key == twin
        )
        assert DecisionReason.EMPTY_MICROBATCH not in {
            reason for key, reason in decisions if key.uniform_query_len == 1
        }
        assert serve(engine, asked, as_eager=True) == expected


LOADS = [(3, 8), (4, 8), (2, 5), (8, 8), (3, 3), (0, 8), (1, 8)]


def rank_run(backend, *, spread=True):
    run = spread_run(sizes=(2, 4, 8), spread=spread)
    settings = {
        "data_parallel_size": 2,
        "all2all_backend": backend,
        "verify_decisions": True,
    }
    return run.model_copy(update={"parallel": run.parallel.model_copy(update=settings)})


def steps_of_a_rank(ranks, run):
    """Each load's decision, rows, distance from a lone engine, and whether tokens are its."""
    engine = build_engine(run, ranks=ranks)
    alone = build_engine(tiny_run(CapturePolicy.NONE, sizes=None))
    found = []
    try:
        for one in (engine, alone):
            with one.active():
                for key in one.plan.keys:
                    one.capture(key, lambda phase: None)
                one.live.fill(CONTEXTS, [1] * 8, engine.input_seed)
        for load in LOADS:
            count = load[ranks.rank]
            with engine.active():
                step = engine.live.step([1] * count) if count else IDLE_STEP
                decision = engine.runner.decide(step)
                hidden, tokens, rows = run_rows(engine, step, decision)
                eager = dataclasses.replace(decision, key=decision.key.as_eager())
                again, _, _ = run_rows(engine, step, eager)
                assert torch.equal(hidden, again), f"{load}: the replay differs from eager"
            difference, alike = 0.0, True
            if count:
                with alone.active():
                    step = alone.live.step([1] * count)
                    wanted, expected, _ = run_rows(
                        alone, step, alone.decision_for(eager_key(count))
                    )
                difference, alike = float((hidden - wanted).abs().max()), tokens == expected
            found.append((str(decision.key), decision.reason.value, rows, difference, alike))
        replays = {str(key): graph.replays for key, graph in engine.graphs.captured.items()}
    finally:
        engine.close()
        alone.close()
    return found, replays


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "backend", [All2AllBackend.ALLGATHER_REDUCESCATTER, All2AllBackend.ALL_TO_ALL]
)
def test_two_ranks_spread_only_where_a_rank_has_too_few(backend):
    results = run_ranks(2, steps_of_a_rank, rank_run(backend))
    twin, small = "FULL-8x8q1-mb2", "FULL-4x4q1-mb2"
    wanted = [
        (twin, "spread"),
        (twin, "spread"),
        (twin, "spread"),
        (twin, "graph"),
        (small, "graph"),
        ("FULL-8x8q1", "graph"),
        ("FULL-8x8q1", "graph"),
    ]
    rows = [
        [[0, 1, 4], [0, 1, 4, 5], [0, 4], list(range(8)), [0, 1, 2], [], [0]],
        # A rank that reaches the last microbatch stays as it is.
        [list(range(8)), list(range(8)), list(range(5)), list(range(8)), [0, 1, 2]]
        + [list(range(8))] * 2,
    ]
    for (found, replays), taken in zip(results, rows, strict=True):
        assert [(key, reason) for key, reason, *_ in found] == wanted
        assert [one[2] for one in found] == taken
        for load, (*_, difference, alike) in zip(LOADS, found, strict=True):
            assert difference < 1e-5, (load, difference)
            assert alike, load
        assert replays[twin] == 4


def serve_on_a_rank(ranks, run):
    """What this rank's requests got, what a lone engine gives them, and the spread steps."""
    asked = requests_for(8 if ranks.rank else 4, seed=ranks.rank)
    outputs = []
    for engine in (
        build_engine(run, ranks=ranks),
        build_engine(tiny_run(CapturePolicy.NONE, sizes=None)),
    ):
        try:
            with engine.active():
                for key in engine.plan.keys:
                    engine.capture(key, lambda phase: None)
                outputs.append(serve(engine, asked))
                decisions = {
                    (str(key), reason.value): times
                    for (key, reason), times in engine.runner.decisions.items()
                }
                outputs.append(decisions)
        finally:
            engine.close()
    return outputs


@pytest.mark.ranks(2)
def test_two_ranks_serve_the_tokens_of_lone_engines_while_requests_end():
    results = run_ranks(2, serve_on_a_rank, rank_run(All2AllBackend.ALL_TO_ALL))
    assert results[0][1] == results[1][1]
    spread = sum(times for (_, reason), times in results[0][1].items() if reason == "spread")
    assert spread >= 4
    for served, _, expected, _ in results:
        assert served == expected
