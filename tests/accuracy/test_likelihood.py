import numpy as np
import pytest
import torch

from cgprof.accuracy.likelihood import Forced, forced_log_probs, refill_mark, token_log_probs
from cgprof.batch.request import Request
from cgprof.engine.live import make_step
from cgprof.errors import ConfigError
from cgprof.shapes import CapturePolicy, DecisionReason, RuntimeMode
from tests.support.builders import captured_engine, tiny_run

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
VOCAB = 128


def sequences(count, *, seed=0, prompt=(1, 12), gold=(1, 16)):
    rng = np.random.default_rng(seed)
    return [
        Forced(
            prompt=tuple(rng.integers(0, VOCAB, rng.integers(*prompt)).tolist()),
            gold=tuple(rng.integers(0, VOCAB, rng.integers(*gold)).tolist()),
        )
        for _ in range(count)
    ]


def full_forward(engine, sequence):
    """Log-probabilities of the gold tokens from one pass over the whole sequence."""
    tokens = sequence.prompt + sequence.gold
    row = engine.table.add(Request(request_id="0", prompt=tokens, max_new_tokens=0))
    rows = np.array([row], np.int32)
    engine.block_table.ensure(rows, engine.table.num_tokens[rows])
    step = make_step(rows, np.array([len(tokens)], np.int32))
    hidden = engine.reference(chunk=64).hidden(step)
    engine.live.clear()
    logits = engine.model.logits(hidden)[len(sequence.prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(sequence.gold)[:, None])[:, 0].numpy()


@pytest.mark.parametrize("policy", [CapturePolicy.FULL, CapturePolicy.FULL_DECODE_ONLY])
def test_forced_decoding_equals_one_full_forward(policy):
    asked = sequences(14)
    with captured_engine(tiny_run(policy, dbo=True)) as engine:
        found, _ = forced_log_probs(engine, asked, "replay")
        expected = [full_forward(engine, sequence) for sequence in asked]
    assert [scores.size for scores in found] == [len(sequence.gold) for sequence in asked]
    for scores, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(scores, wanted, atol=2e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", [CapturePolicy.FULL, CapturePolicy.FULL_DECODE_ONLY])
def test_eager_equals_replay_bitwise_over_the_same_steps(policy, device):
    asked = sequences(14, seed=1)
    with captured_engine(tiny_run(policy, dbo=True, device=device)) as engine:
        replay, by_replay = forced_log_probs(engine, asked, "replay")
        eager, by_eager = forced_log_probs(engine, asked, "eager")
    for one, other in zip(replay, eager, strict=True):
        np.testing.assert_array_equal(one, other)
    assert {key.as_eager(): count for key, count in by_replay.tokens.items()} == by_eager.tokens
    assert not by_eager.replays
    assert by_replay.count(twins=True) > by_replay.count(twins=False) > 0


def test_every_gold_token_is_counted_once_and_replays_are_the_managers():
    asked = sequences(12, seed=2)
    with captured_engine(tiny_run(dbo=True)) as engine:
        before = {key: graph.replays for key, graph in engine.graphs.captured.items()}
        _, coverage = forced_log_probs(engine, asked, "replay")
        after = {key: g.replays - before[key] for key, g in engine.graphs.captured.items()}
        forced_log_probs(engine, asked[:3], "replay")
    assert sum(coverage.tokens.values()) == sum(len(sequence.gold) for sequence in asked)
    assert coverage.replays == {key: count for key, count in after.items() if count}
    parts = coverage.count(twins=True), coverage.count(twins=False), coverage.num_eager
    assert sum(parts) == sum(coverage.tokens.values())


def test_decode_steps_hold_the_threshold_until_items_run_out():
    asked = sequences(40, seed=3, prompt=(2, 9), gold=(4, 20))
    with captured_engine(tiny_run(dbo=True)) as engine:
        assert refill_mark(engine) == 4
        _, coverage = forced_log_probs(engine, asked, "replay")
        decided = engine.runner.decisions
    sizes = {key.num_tokens: n for (key, _), n in decided.items() if key.mode is RuntimeMode.FULL}
    large = sum(n for size, n in sizes.items() if size >= 4)
    small = sum(n for size, n in sizes.items() if size < 4)
    assert small <= 20  # of the last requests alone
    assert large > 3 * small
    assert coverage.count(twins=True) > 0.6 * sum(coverage.tokens.values())
    assert (DecisionReason.GRAPH in {reason for _, reason in decided}) is True


def test_first_gold_token_is_scored_by_a_decode_step():
    one_each = [Forced(prompt=(1, 2, 3), gold=(4,)) for _ in range(4)]
    with captured_engine(tiny_run()) as engine:
        _, coverage = forced_log_probs(engine, one_each, "replay")
    assert coverage.count(twins=False) == 4
    assert coverage.num_eager == 0


def test_likelihood_survives_a_cache_that_pauses_requests():
    asked = sequences(10, seed=4, prompt=(30, 40), gold=(12, 20))
    with captured_engine(tiny_run(dbo=True)) as engine:
        roomy, _ = forced_log_probs(engine, asked, "replay")
    with captured_engine(tiny_run(dbo=True, num_gpu_blocks_override=12)) as engine:
        tight, _ = forced_log_probs(engine, asked, "replay")
        assert engine.scheduler.num_preemptions > 0
    for one, other in zip(roomy, tight, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4)


def test_sequences_that_do_not_fit_are_refused_before_any_step():
    with captured_engine(tiny_run(CapturePolicy.NONE)) as engine:
        too_long = Forced(prompt=(1,) * 300, gold=(2,) * 100)
        for bad in (too_long, Forced(prompt=(), gold=(1,)), Forced(prompt=(1,), gold=())):
            with pytest.raises(ConfigError):
                forced_log_probs(engine, [*sequences(2), bad], "replay")
        assert not engine.scheduler.has_work
        assert not engine.runner.decisions


def test_token_log_probs_are_the_log_softmax_even_of_large_logits():
    logits = torch.randn(5, 64) * 50
    tokens = torch.tensor([0, 1, 5, 63, 7])
    expected = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(
        token_log_probs(logits, tokens).double(), expected, rtol=1e-6, atol=1e-4
    )
