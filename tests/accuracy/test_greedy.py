import pytest

from cgprof.accuracy.greedy import GreedyRun, check_greedy, divergences_of, judge
from cgprof.batch.request import Request
from cgprof.engine.engine import serve
from cgprof.shapes import CapturePolicy
from tests.support.builders import captured_engine, tiny_run

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=DEVICES)
def engine(request):
    run = tiny_run(dbo=True, device=request.param, max_model_len=96)
    with captured_engine(run) as engine:
        yield engine


@pytest.fixture(scope="module")
def result(engine):
    return check_greedy(engine, steps=64)


def test_greedy_run_of_replays_equals_eager_at_equal_padding(result):
    assert result.passed is True, result
    assert result.steps >= 64
    assert result.tokens_compared > 300
    assert result.divergences == ()
    assert result.max_logit_diff == 0
    assert result.nonfinite == 0


def test_greedy_run_replays_plain_graphs_and_twins_of_a_shrinking_batch(engine, result):
    labels = {str(key): key for key in engine.graphs.keys}
    assert set(result.replays) <= set(labels)
    replayed = [labels[label] for label in result.replays]
    assert any(key.is_twin for key in replayed)
    assert any(not key.is_twin for key in replayed)
    assert len({key.num_tokens for key in replayed}) > 1


def test_greedy_run_reaches_contexts_beyond_the_measured_one(engine, result):
    assert result.longest_context == engine.config.limits.max_model_len - 1
    assert result.longest_context > engine.config.measure.context_len


def test_identical_prompts_have_one_output_and_the_noise_floor_is_shown(result):
    assert result.identical == 4
    assert result.identical_outputs == result.identical_outputs_eager
    assert result.noise_logit_diff is not None


def test_engine_serves_as_usual_after_a_greedy_run(engine, result):
    request = Request(request_id="a", prompt=(1, 2, 3), max_new_tokens=4)
    assert len(serve(engine, [request])["a"]) == 4


def test_without_a_graph_there_is_no_verdict():
    run = tiny_run(CapturePolicy.NONE, max_model_len=96)
    with captured_engine(run) as engine:
        result = check_greedy(engine, steps=64)
    assert result.passed is None
    assert "not verified" in result.note
    assert result.replays == {}


def test_captured_twins_that_never_replay_leave_no_verdict(engine, monkeypatch):
    decide = engine.runner.decide
    plain = next(key for key in engine.graphs.keys if key.num_tokens == 8 and not key.is_twin)

    def plain_only(step):
        decision = decide(step)
        return engine.decision_for(plain) if decision.key.is_twin else decision

    monkeypatch.setattr(engine.runner, "decide", plain_only)
    result = check_greedy(engine, steps=64)
    assert result.passed is None
    assert "no twin replayed" in result.note


def test_not_finite_hidden_state_fails(engine, monkeypatch):
    replay, count = engine.graphs.replay, {"steps": 0}

    def spoil_one(graph):
        outputs = replay(graph)
        count["steps"] += 1
        if count["steps"] == 30:
            outputs[0, 0] = float("nan")
        return outputs

    monkeypatch.setattr(engine.graphs, "replay", spoil_one)
    result = check_greedy(engine, steps=64)
    assert result.passed is False
    assert result.nonfinite > 0


def test_one_wrong_replay_is_found_at_its_token(engine, monkeypatch):
    replay, count = engine.graphs.replay, {"steps": 0}

    def spoil_one(graph):
        outputs = replay(graph)
        count["steps"] += 1
        if count["steps"] == 30:
            outputs[0] = -outputs[0]
        return outputs

    monkeypatch.setattr(engine.graphs, "replay", spoil_one)
    result = check_greedy(engine, steps=64)
    assert result.passed is False
    assert len(result.divergences) == 1
    first = result.divergences[0]
    assert first.tokens[0] != first.tokens[1]
    assert None not in first.gaps
    assert not first.explained
    assert result.identical_outputs > result.identical_outputs_eager


def run_of(tokens, gaps, best=None):
    return GreedyRun(
        tokens={"a": tokens},
        gaps={"a": gaps},
        best={"a": best or [1.0] * len(tokens)},
        prompts={"a": (1,)},
        steps=len(tokens),
    )


def test_first_difference_has_its_index_and_both_gaps():
    found = divergences_of(run_of([1, 2, 3], [1, 0.5, 1]), run_of([1, 7, 9], [1, 0.25, 1]), 0.1)
    assert len(found) == 1
    assert (found[0].index, found[0].tokens, found[0].gaps) == (1, (2, 7), (0.5, 0.25))
    assert not found[0].explained


def test_difference_within_the_noise_is_explained_and_inconclusive(engine):
    key = engine.graphs.keys[0]
    replay, eager = run_of([1, 2], [1, 0.01]), run_of([1, 3], [1, 0.02])
    replay.replays.update(engine.graphs.keys)
    unpadded = run_of([1, 3], [1, 0.02], [1.0, 1.02])
    result = judge(engine, replay, eager, unpadded)
    assert key in replay.replays
    assert result.divergences[0].explained
    assert result.passed is None
    assert "inconclusive" in result.note
    wide = run_of([1, 3], [1, 0.02], [1.0, 1.001])
    assert judge(engine, replay, eager, wide).passed is False


def test_identical_prompts_may_part_only_where_eager_parts_too(engine):
    def two(first, second):
        run = run_of(first, [1.0] * 2)
        run.tokens["b"], run.gaps["b"], run.best["b"] = second, [1.0] * 2, [1.0] * 2
        run.prompts["b"] = (1,)
        run.replays.update(engine.graphs.keys)
        return run

    parted, alike = two([1, 2], [1, 3]), two([1, 2], [1, 2])
    assert judge(engine, parted, parted, parted).passed is True
    assert judge(engine, parted, alike, alike).passed is False
    assert judge(engine, alike, alike, alike).passed is True
