import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from cgprof.config.schema import ParallelConfig
from cgprof.errors import RankError
from cgprof.graphs.dispatch import decide, eager_key, vote
from cgprof.parallel.canonical import canonical_hash
from cgprof.parallel.dp import (
    VoteExchange,
    decision_state,
    decode_vote,
    describe_decision,
    encode_decision,
    encode_vote,
)
from cgprof.parallel.rounds import NUM_VALUES
from cgprof.shapes import (
    BatchShape,
    DecisionReason,
    GraphKey,
    RuntimeMode,
    StepDecision,
    StepVote,
)
from tests.support.graphs import DBO, decode, decode_key, plan, prefill
from tests.support.ranks import run_ranks

COUNTS = st.integers(0, 2**40)
SHAPES = st.builds(
    BatchShape, num_reqs=COUNTS, num_tokens=COUNTS, max_query_len=COUNTS, num_prefills=COUNTS
)
VOTES = st.builds(
    StepVote, shape=SHAPES, mode=st.sampled_from(RuntimeMode), wants_microbatch=st.booleans()
)
KEYS = st.builds(
    GraphKey,
    mode=st.sampled_from(RuntimeMode),
    num_tokens=COUNTS,
    num_reqs=st.none() | st.integers(1, 512),
    uniform_query_len=st.none() | st.integers(1, 8),
    num_microbatches=st.integers(1, 8),
)
DECISIONS = st.builds(
    StepDecision,
    key=KEYS,
    tokens_per_rank=st.lists(COUNTS, min_size=1, max_size=4).map(tuple),
    reason=st.sampled_from(DecisionReason),
)
LOADS = [(7, 64), (63, 128), (64, 128), (65, 128), (128, 128), (8, 0), (0, 0), (33, 33), (300, 1)]
SHORT = ParallelConfig(replay_timeout_s=1, startup_timeout_s=30)


@given(cast=VOTES, state=st.integers(0, 2**64 - 1))
def test_a_vote_survives_the_exchange_s_numbers(cast, state):
    values = encode_vote(cast, state)
    assert len(values) <= NUM_VALUES
    as_sent = torch.tensor(values, dtype=torch.int64).tolist()
    assert decode_vote(as_sent) == (cast, state)


@given(decision=DECISIONS)
def test_a_decision_s_numbers_name_its_key_and_reason(decision):
    as_sent = torch.tensor(encode_decision(decision), dtype=torch.int64).tolist()
    assert len(as_sent) <= NUM_VALUES
    text = describe_decision(as_sent)
    assert text.startswith(f"{decision.key} ({decision.reason.value}, ")


def test_decision_state_sees_keys_and_rule_but_not_the_order_of_keys():
    keys = plan(microbatch=DBO).keys
    state = decision_state(keys, DBO)
    assert decision_state(reversed(keys), DBO) == state
    later = DBO.model_copy(update={"decode_token_threshold": 33})
    others = {decision_state(keys[1:], DBO), decision_state(keys, later), state}
    assert len(others) == 3


def decide_over_ranks(ranks, loads_of_steps):
    """Each step: this rank's own vote, all votes, the decision and its check."""
    keys = plan(microbatch=DBO).keys
    exchange = VoteExchange(ranks, lambda: decision_state(keys, DBO))
    decisions = []
    for loads in loads_of_steps:
        exchange.start(vote(decode(loads[ranks.rank]), keys, DBO))
        decision = decide(exchange.finish(), keys, DBO)
        exchange.verify(decision)
        decisions.append(decision)
    return decisions


@pytest.mark.ranks(4)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_decide_alike_over_their_exchanged_votes(size):
    steps = [(loads * 2)[:size] for loads in LOADS]
    results = run_ranks(size, decide_over_ranks, steps)
    keys = plan(microbatch=DBO).keys
    expected = [decide([vote(decode(n), keys, DBO) for n in step], keys, DBO) for step in steps]
    assert results == [expected] * size
    assert [decision.tokens_per_rank for decision in expected] == steps


@pytest.mark.ranks(2)
def test_ranks_use_the_synced_size_and_refuse_a_twin_with_an_empty_half():
    decisions = run_ranks(2, decide_over_ranks, LOADS[:5])[1]
    empty, graph = DecisionReason.EMPTY_MICROBATCH, DecisionReason.GRAPH
    assert [(decision.key, decision.reason) for decision in decisions] == [
        (decode_key(64), graph),
        (decode_key(128), empty),
        (decode_key(128), empty),
        (decode_key(128, num_microbatches=2), graph),
        (decode_key(128, num_microbatches=2), graph),
    ]


def cast_with_state(ranks, states):
    exchange = VoteExchange(ranks, lambda: states[ranks.rank])
    exchange.start(vote(prefill(9), (), DBO))
    try:
        exchange.finish()
    except RankError as error:
        return str(error)
    return None


@pytest.mark.ranks(4)
def test_a_rank_that_would_decide_by_other_state_is_refused_with_both_hashes():
    same, other = canonical_hash("keys"), canonical_hash("other keys")
    found = run_ranks(4, cast_with_state, [same, same, other, same])
    message = (
        "rank 2: ranks would decide by unlike keys, settings or code: "
        f"rank 2 has state {other:016x}; ranks 0, 1, 3 have state {same:016x}"
    )
    assert found == [message] * 4


@pytest.mark.ranks(2)
def test_states_that_differ_in_either_half_only_are_told_apart():
    for bit in (0, 31, 32, 63):
        found = run_ranks(2, cast_with_state, [0, 1 << bit])
        assert found[0] == found[1]
        assert found[0] is not None


def verify_own(ranks, decisions):
    try:
        VoteExchange(ranks, int).verify(decisions[ranks.rank])
    except RankError as error:
        return str(error)
    return None


@pytest.mark.ranks(2)
def test_verify_names_the_rank_and_both_decisions():
    graph = StepDecision(key=decode_key(64), tokens_per_rank=(7, 64), reason=DecisionReason.GRAPH)
    eager = StepDecision(key=eager_key(64), tokens_per_rank=(7, 64), reason=DecisionReason.NO_FIT)
    found = run_ranks(2, verify_own, [graph, eager])
    assert found[0] == found[1]
    assert found[0].startswith("rank 1: decisions differ: rank 1 has NONE-64 (no-fit, hash ")
    assert "; rank 0 has FULL-64x64q1 (graph, hash " in found[0]
    assert run_ranks(2, verify_own, [graph, graph]) == [None, None]


@pytest.mark.ranks(2)
def test_verify_sees_tokens_that_no_number_of_its_own_carries():
    first, second = (
        StepDecision(key=decode_key(64), tokens_per_rank=loads, reason=DecisionReason.GRAPH)
        for loads in ((7, 64), (8, 64))
    )
    found = run_ranks(2, verify_own, [first, second])
    assert None not in found


def out_of_step(ranks):
    """Rank 1 skips the check of a decision and goes on to the next step's vote."""
    exchange = VoteExchange(ranks, int)
    try:
        exchange.start(vote(decode(4), (), DBO))
        exchange.finish()
        if ranks.rank == 0:
            exchange.verify(
                StepDecision(key=eager_key(4), tokens_per_rank=(4, 4), reason=DecisionReason.NO_FIT)
            )
        exchange.start(vote(decode(4), (), DBO))
        exchange.finish()
    except RankError as error:
        return error.rank, error.problem
    return None


@pytest.mark.ranks(2)
def test_a_rank_out_of_step_is_named_with_where_it_is():
    found = run_ranks(2, out_of_step)
    assert found[0] == found[1]
    rank, problem = found[0]
    assert rank == 1
    assert problem.startswith("out of step: rank 1 has round ")
    assert " (vote); rank 0 has round " in problem
    assert problem.endswith(" (decision)")


def abstain(ranks, late):
    if ranks.rank == late:
        return None
    return cast_with_state(ranks, [0] * ranks.size)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_that_never_votes_is_named_after_the_timeout(silent):
    found = run_ranks(2, abstain, silent, parallel=SHORT, spoils=True)
    assert found[1 - silent].startswith(
        f"rank {silent}: did not answer; others waited in round 1 ("
    )


def overlap(ranks):
    """Rank 1 votes only when rank 0, whose vote has started, has sent it a token."""
    exchange = VoteExchange(ranks, int)
    token = torch.zeros(1)
    if ranks.rank == 1:
        dist.recv(token, src=0, group=ranks.eager)
    exchange.start(vote(decode(ranks.rank), (), DBO))
    if ranks.rank == 0:
        dist.send(token, dst=1, group=ranks.eager)
    return [cast.shape.num_tokens for cast in exchange.finish()]


@pytest.mark.ranks(2)
def test_start_returns_before_the_other_ranks_have_voted():
    assert run_ranks(2, overlap) == [[0, 1]] * 2


def leave_a_vote(ranks):
    """Rank 0 leaves its vote without its finish; rank 1 is at a barrier already."""
    exchange = VoteExchange(ranks, int)
    if ranks.rank == 0:
        exchange.start(vote(decode(1), (), DBO))
    try:
        ranks.barrier()
    except RankError as error:
        return error.problem
    return None


@pytest.mark.ranks(2)
def test_a_vote_without_its_finish_is_finished_before_the_next_round():
    found = run_ranks(2, leave_a_vote, parallel=SHORT, spoils=True)
    assert found[0] == found[1]
    assert found[0].endswith("(barrier); rank 0 has round 1 (vote)")
