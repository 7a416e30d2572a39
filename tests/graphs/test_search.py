import dataclasses

import pytest

from cgprof.config.schema import Limits
from cgprof.graphs import search as searching
from cgprof.graphs.dispatch import choose, decide, eager_key, widest
from cgprof.graphs.search import search
from cgprof.shapes import CapturePolicy, DecisionReason, RuntimeMode, StepDecision
from tests.support.graphs import DBO, plan

SEQS = 40
LIMITS = Limits(max_num_seqs=SEQS, max_num_batched_tokens=256)
CONFIG = DBO.model_copy(update={"decode_token_threshold": 4, "prefill_token_threshold": 16})


def looked_for(rule=searching.as_built, *, num_ranks=2, limits=LIMITS, config=CONFIG, keys=None):
    if keys is None:
        keys = plan(seqs=limits.max_num_seqs, tokens=256, microbatch=config).keys
    return search(keys, limits, config, num_ranks=num_ranks, seed=3, rule=rule)


def tokens(result):
    return [shape.num_tokens for shape in result.finding.shapes]


@pytest.mark.parametrize("policy", [CapturePolicy.FULL, CapturePolicy.FULL_DECODE_ONLY])
@pytest.mark.parametrize("count", range(2, 9))
def test_the_rule_as_built_passes_over_all_small_loads(policy, count, monkeypatch):
    monkeypatch.setattr(searching, "DRAWN_MIXED", 400)
    limits = Limits(max_num_seqs=20, max_num_batched_tokens=64)
    config = CONFIG.model_copy(
        update={
            "num_microbatches": count,
            "decode_token_threshold": count,
            "prefill_token_threshold": count,
        }
    )
    keys = plan(policy, seqs=20, tokens=64, microbatch=config).keys
    assert any(key.is_twin for key in keys)
    result = looked_for(limits=limits, config=config, keys=keys)
    assert result.finding is None
    decodes, mixed = result.spaces
    assert decodes.is_exhaustive
    assert decodes.looked_at == decodes.possible == 21**2
    assert (mixed.looked_at, mixed.possible) == (400, None)
    assert result.looked_at == 21**2 + 400


def test_a_rule_that_asks_the_ranks_own_load_is_found():
    def own_load(rank, votes, keys, config):
        own = votes[rank]
        key = choose(own.shape, keys) or eager_key(own.shape.num_tokens)
        loads = tuple(vote.shape.num_tokens for vote in votes)
        return StepDecision(key=key, tokens_per_rank=loads, reason=DecisionReason.GRAPH)

    result = looked_for(own_load)
    assert tokens(result) == [0, 1]
    assert result.finding.problem == ("rank 0 decides NONE-0 (graph) and rank 1 FULL-1x1q1 (graph)")
    assert result.looked_at == 2


def test_the_strict_comparison_of_the_guard_is_found_at_its_boundary():
    def strictly_below(rank, votes, keys, config):
        loads = [vote.shape.num_tokens for vote in votes]
        twin = choose(widest(votes), keys, num_microbatches=2)
        wish = all(vote.wants_microbatch for vote in votes)
        if twin and wish and not 2 * min(loads) < twin.num_tokens:
            return StepDecision(key=twin, tokens_per_rank=tuple(loads), reason=DecisionReason.GRAPH)
        return decide(votes, keys, config)

    result = looked_for(strictly_below)
    small, large = tokens(result)
    assert (small, large) == (4, 5)
    assert result.finding.problem == "rank 0: microbatch 1 of FULL-8x8q1-mb2 has no token ([4, 0])"


def test_a_rule_that_depends_on_the_order_of_keys_is_found():
    def first_that_covers(rank, votes, keys, config):
        decision = decide(votes, keys, config)
        fits = [key for key in keys if key.covers(widest(votes)) and not key.is_twin]
        return dataclasses.replace(decision, key=fits[0]) if fits else decision

    assert "and rank 1" in looked_for(first_that_covers).finding.problem


def test_a_key_that_is_too_small_or_was_never_captured_is_found():
    def smallest(rank, votes, keys, config):
        decision = decide(votes, keys, config)
        return dataclasses.replace(decision, key=min(keys, key=lambda key: key.num_tokens))

    assert "does not fit FULL-1x1q1" in looked_for(smallest).finding.problem

    def invented(rank, votes, keys, config):
        decision = decide(votes, keys, config)
        return dataclasses.replace(
            decision, key=dataclasses.replace(decision.key, num_tokens=255, mode=RuntimeMode.FULL)
        )

    assert "is no captured key" in looked_for(invented).finding.problem


def test_a_fault_with_prompts_alone_is_found_by_the_drawn_loads():
    def breaks_with_prompts(rank, votes, keys, config):
        decision = decide(votes, keys, config)
        prompts = [vote.shape.num_prefills for vote in votes]
        if rank and sum(prompts) == 1 and decision.key.num_tokens > 100:
            return dataclasses.replace(decision, reason=DecisionReason.IDLE)
        return decision

    result = looked_for(breaks_with_prompts)
    assert [space.is_exhaustive for space in result.spaces] == [True, False]
    assert sum(shape.num_prefills for shape in result.finding.shapes) == 1
    again = looked_for(breaks_with_prompts)
    assert again == result


def test_many_ranks_draw_their_loads_near_where_decisions_change(monkeypatch):
    monkeypatch.setattr(searching, "DRAWN_DECODES", 500)
    monkeypatch.setattr(searching, "DRAWN_MIXED", 10)
    seen = set()

    def noting(rank, votes, keys, config):
        seen.update(vote.shape.num_tokens for vote in votes)
        return decide(votes, keys, config)

    result = looked_for(noting, num_ranks=4)
    assert result.finding is None
    assert (result.spaces[0].looked_at, result.spaces[0].possible) == (500, 41**4)
    assert not result.spaces[0].is_exhaustive
    assert {0, 3, 4, 5, 39, 40} <= seen
