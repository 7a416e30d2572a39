"""The votes of all ranks in one small CPU collective a step, and the check of what follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from cgprof.config.schema import MicrobatchConfig
from cgprof.parallel.blame import unlike
from cgprof.parallel.canonical import canonical_hash, code_version
from cgprof.parallel.groups import Ranks
from cgprof.parallel.rounds import RoundKind
from cgprof.shapes import BatchShape, DecisionReason, GraphKey, RuntimeMode, StepDecision, StepVote

_HALF = 32
_REASONS = tuple(DecisionReason)


class VoteExchange:
    """Shares each step's votes between ranks.

    `state_hash` gives 64 bits of all else that the decision reads, such as `decision_state`; ranks
    whose hashes differ could decide differently, and are refused before anything is launched.
    """

    def __init__(self, ranks: Ranks, state_hash: Callable[[], int]) -> None:
        self._ranks = ranks
        self._state_hash = state_hash

    def start(self, vote: StepVote) -> None:
        """Sends this rank's vote and returns at once."""
        values = encode_vote(vote, self._state_hash())
        self._ranks.rounds.start(RoundKind.VOTE, values, timeout_s=self._ranks.answer_timeout_s)

    def finish(self) -> list[StepVote]:
        """Waits for all votes and returns them in rank order.

        Raises:
            RankError: A rank would decide by other state, is in another step, or did not answer.
        """
        votes, states = zip(*map(decode_vote, self._ranks.rounds.finish()), strict=True)
        if len(set(states)) > 1:
            what = "ranks would decide by unlike keys, settings or code"
            raise unlike(what, [f"state {state:016x}" for state in states])
        return list(votes)

    def verify(self, decision: StepDecision) -> None:
        """Compares this rank's decision with all others'.

        Raises:
            RankError: One differs, or a rank is in another step or did not answer.
        """
        rounds, limit = self._ranks.rounds, self._ranks.answer_timeout_s
        rounds.start(RoundKind.DECISION, encode_decision(decision), timeout_s=limit)
        rows = rounds.finish()
        if any(row != rows[0] for row in rows):
            raise unlike("decisions differ", [describe_decision(row) for row in rows])


def decision_state(keys: Iterable[GraphKey], microbatch: MicrobatchConfig) -> int:
    """Returns the 64 bits that stand for what decisions read besides votes: keys, rule and code."""
    return canonical_hash([sorted(map(str, keys)), microbatch, code_version()])


def encode_vote(vote: StepVote, state: int) -> list[int]:
    """Returns a vote and 64 bits of state as numbers of a round."""
    shape = vote.shape
    return [
        shape.num_tokens,
        shape.num_reqs,
        shape.max_query_len,
        shape.num_prefills,
        vote.mode,
        vote.wants_microbatch,
        *_halves(state),
    ]


def decode_vote(values: Sequence[int]) -> tuple[StepVote, int]:
    """Returns the vote and the state of a rank's numbers."""
    num_tokens, num_reqs, max_query_len, num_prefills, mode, wants, high, low = values
    shape = BatchShape(
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        max_query_len=max_query_len,
        num_prefills=num_prefills,
    )
    vote = StepVote(shape=shape, mode=RuntimeMode(mode), wants_microbatch=bool(wants))
    return vote, high << _HALF | low


def encode_decision(decision: StepDecision) -> list[int]:
    """Returns a decision's key, reason and hash as numbers of a round; 0 stands for None."""
    key = decision.key
    return [
        key.mode,
        key.num_tokens,
        key.num_reqs or 0,
        key.uniform_query_len or 0,
        key.num_microbatches,
        _REASONS.index(decision.reason),
        *_halves(canonical_hash(decision)),
    ]


def describe_decision(values: Sequence[int]) -> str:
    """Returns a rank's decision in words; the hash tells apart what else differs."""
    mode, num_tokens, num_reqs, uniform_query_len, num_microbatches, reason, high, low = values
    key = GraphKey(
        mode=RuntimeMode(mode),
        num_tokens=num_tokens,
        num_reqs=num_reqs or None,
        uniform_query_len=uniform_query_len or None,
        num_microbatches=num_microbatches,
    )
    return f"{key} ({_REASONS[reason].value}, hash {high << _HALF | low:016x})"


def _halves(bits: int) -> tuple[int, int]:
    return bits >> _HALF, bits & (1 << _HALF) - 1
