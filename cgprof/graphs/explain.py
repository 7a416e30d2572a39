"""Why the ranks decide as they do for a load, in words. Pure: votes and keys in, sentences out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cgprof.config.schema import MicrobatchConfig
from cgprof.graphs.dispatch import choose, decide, vote, widest
from cgprof.microbatch.rule import last_microbatch_is_empty, wants_split
from cgprof.shapes import BatchShape, DecisionReason, GraphKey, RuntimeMode, StepDecision, StepVote


@dataclass(frozen=True, slots=True, kw_only=True)
class RankVote:
    """What one rank would do alone, and why it does not want to split; empty if it does."""

    rank: int
    vote: StepVote
    alone: GraphKey | None
    why_unsplit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A decision in words. `why_unsplit` is empty where the step is split."""

    ranks: tuple[RankVote, ...]
    decision: StepDecision
    why: str
    why_unsplit: str


def load_shape(decode_tokens: int, *, query_len: int = 1, prefill_tokens: int = 0) -> BatchShape:
    """Returns a rank's batch: decode requests of one query length, and one prompt chunk if any."""
    chunks = 1 if prefill_tokens else 0
    return BatchShape(
        num_reqs=decode_tokens // query_len + chunks,
        num_tokens=decode_tokens + prefill_tokens,
        max_query_len=max(query_len if decode_tokens else 0, prefill_tokens),
        num_prefills=chunks,
    )


def explain(
    shapes: Sequence[BatchShape], keys: Collection[GraphKey], config: MicrobatchConfig
) -> Explanation:
    """Returns what ranks with these batches vote and decide, `keys` being captured on all."""
    votes = [vote(shape, keys, config) for shape in shapes]
    decision = decide(votes, keys, config)
    return Explanation(
        ranks=tuple(
            RankVote(
                rank=rank,
                vote=cast,
                alone=choose(cast.shape, keys),
                why_unsplit=_why_no_wish(cast.shape, config),
            )
            for rank, cast in enumerate(votes)
        ),
        decision=decision,
        why=_why(votes, decision, config),
        why_unsplit=_why_unsplit(votes, keys, decision, config),
    )


def microbatch_loads(
    num_real: int, num_padded: int, num_microbatches: int, *, spread: bool = False
) -> list[int]:
    """Returns how many of a rank's tokens each microbatch of a padded step holds.

    With `spread`, those of a rank that would not reach the last one are shared evenly.
    """
    width = num_padded // num_microbatches
    if spread and num_real <= width * (num_microbatches - 1):
        return [len(range(index, num_real, num_microbatches)) for index in range(num_microbatches)]
    starts = [index * width for index in range(num_microbatches)]
    return [
        max(0, min(num_real, end) - start)
        for start, end in zip(starts, [*starts[1:], num_padded], strict=True)
    ]


def _why(votes: Sequence[StepVote], decision: StepDecision, config: MicrobatchConfig) -> str:
    shape, key = widest(votes), decision.key
    match decision.reason:
        case DecisionReason.IDLE:
            return "no rank has a token to compute"
        case DecisionReason.EMPTY_MICROBATCH:
            follows = (
                "all ranks run eager, unsplit"
                if key.mode is RuntimeMode.NONE
                else (f"all ranks replay the plain key of {key.num_tokens} tokens")
            )
            return f"split, one rank would have an empty microbatch; {follows}"
        case DecisionReason.RANK_EAGER:
            eager = [
                rank
                for rank, cast in enumerate(votes)
                if cast.mode is RuntimeMode.NONE and cast.shape.num_tokens
            ]
            return f"{_ranks(eager)} no graph for its own batch, and ranks replay together or not"
        case DecisionReason.NO_FIT:
            lacking = "twin" if key.num_microbatches > 1 else "captured key"
            return f"no {lacking} holds {_needs(shape)}; all ranks run eager"
        case DecisionReason.SPREAD:
            few = [
                rank
                for rank, cast in enumerate(votes)
                if last_microbatch_is_empty(
                    cast.shape.num_tokens, key.num_tokens, key.num_microbatches
                )
            ]
            return (
                f"{_ranks(few)} too few tokens to reach the last microbatch, and what "
                f"{'it has is' if len(few) == 1 else 'they have is'} spread over all "
                f"{key.num_microbatches} (--dbo-spread-real-tokens)"
            )
        case DecisionReason.GRAPH if key.is_twin:
            last = key.num_tokens // key.num_microbatches * (key.num_microbatches - 1)
            return (
                f"every rank has {_threshold(shape, config)} or more, and more than the first "
                f"{last}, so that no microbatch is empty"
            )
        case DecisionReason.GRAPH:
            return f"it is the smallest captured key that holds {_needs(shape)}"


def _why_unsplit(
    votes: Sequence[StepVote],
    keys: Collection[GraphKey],
    decision: StepDecision,
    config: MicrobatchConfig,
) -> str:
    if decision.key.num_microbatches > 1:
        return ""
    if not config.enabled:
        return _why_no_wish(votes[0].shape, config)
    for rank, cast in enumerate(votes):
        if not cast.wants_microbatch:
            return f"rank {rank}: {_why_no_wish(cast.shape, config)}"
    shape = widest(votes)
    loads = [cast.shape.num_tokens for cast in votes]
    fewest, count = min(loads), config.num_microbatches
    rank = loads.index(fewest)
    if not wants_split(fewest, uniform=shape.uniform_query_len is not None, config=config):
        return f"rank {rank}: {fewest} tokens; over all ranks a step needs " + _threshold(
            shape, config
        )
    if decision.reason is not DecisionReason.EMPTY_MICROBATCH:
        return f"no twin holds {_needs(shape)}"
    twin = choose(shape, keys, num_microbatches=count)
    padded = shape.num_tokens if twin is None else twin.num_tokens
    target = f"an eager split of {padded} tokens" if twin is None else str(twin)
    start = padded // count * (count - 1)
    unspread = "; only a twin of one token a request is spread" if config.spread_real_tokens else ""
    return (
        f"rank {rank}: {fewest} tokens; the last of {count} microbatches of {target} takes those "
        f"after the first {start}, so it would be empty{unspread}"
    )


def _why_no_wish(shape: BatchShape, config: MicrobatchConfig) -> str:
    uniform = shape.uniform_query_len is not None
    if not config.enabled:
        return "dual batch overlap is off"
    if not shape.num_tokens:
        return "idle"
    if wants_split(shape.num_tokens, uniform=uniform, config=config):
        return ""
    if shape.num_tokens < config.num_microbatches:
        return (
            f"{shape.num_tokens} tokens are fewer than the {config.num_microbatches} microbatches"
        )
    return f"{shape.num_tokens} tokens; a split takes {_threshold(shape, config)}"


def _threshold(shape: BatchShape, config: MicrobatchConfig) -> str:
    if shape.uniform_query_len is not None:
        return f"{config.decode_token_threshold} tokens (decode)"
    return f"{config.prefill_token_threshold} tokens (steps with a prompt or unlike lengths)"


def _needs(shape: BatchShape) -> str:
    length = shape.uniform_query_len
    lengths = "unlike query lengths" if length is None else f"query length {length}"
    return f"{shape.num_tokens} tokens and {shape.num_reqs} requests of {lengths}"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    return f"ranks {', '.join(map(str, ranks))} have"


def worst_padding(
    keys: Collection[GraphKey], max_num_seqs: int, config: MicrobatchConfig
) -> tuple[int, int] | None:
    """Returns the decode batch that one rank pads by the largest factor, and to how many tokens.

    None where no batch of one token a request replays a graph.
    """
    padded: list[tuple[int, int]] = []
    for num_reqs in range(1, max_num_seqs + 1):
        shape = BatchShape(num_reqs=num_reqs, num_tokens=num_reqs, max_query_len=1)
        key = decide([vote(shape, keys, config)], keys, config).key
        if key.mode is not RuntimeMode.NONE:
            padded.append((num_reqs, key.num_tokens))
    return max(padded, key=lambda pair: (pair[1] / pair[0], -pair[0]), default=None)
