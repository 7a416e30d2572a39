"""Shape -> key on one rank, and all ranks' votes -> one decision. Pure, equal on every rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from cgprof.config.schema import MicrobatchConfig
from cgprof.microbatch.rule import last_microbatch_is_empty, wants_split
from cgprof.microbatch.spread import can_spread
from cgprof.shapes import BatchShape, DecisionReason, GraphKey, RuntimeMode, StepDecision, StepVote


def choose(
    shape: BatchShape, keys: Iterable[GraphKey], *, num_microbatches: int = 1
) -> GraphKey | None:
    """Returns the key that a batch replays, or None.

    The nearest size wins; inside one size FULL before PIECEWISE, uniform before general,
    request-padded before not and fewer requests before more. A larger size serves when the
    nearest rejects the batch.
    """
    if not shape.num_tokens:
        return None
    fitting = (k for k in keys if k.num_microbatches == num_microbatches and k.covers(shape))
    return min(fitting, key=_preference, default=None)


def vote(shape: BatchShape, keys: Iterable[GraphKey], config: MicrobatchConfig) -> StepVote:
    """Returns what one rank would do alone; `keys` are those that all ranks captured."""
    key = choose(shape, keys)
    return StepVote(
        shape=shape,
        mode=RuntimeMode.NONE if key is None else key.mode,
        wants_microbatch=wants_split(
            shape.num_tokens, uniform=shape.uniform_query_len is not None, config=config
        ),
    )


def decide(
    votes: Sequence[StepVote], keys: Collection[GraphKey], config: MicrobatchConfig
) -> StepDecision:
    """Returns the decision that follows from all ranks' votes, in rank order.

    `keys` are those that all ranks captured.
    """
    shape = widest(votes)
    if not shape.num_tokens:
        return _decision(votes, eager_key(0), DecisionReason.IDLE)
    if _all_want_split(votes, shape, config):
        split = _decide_split(votes, shape, keys, config)
        if split is not None:
            return split
    modes = {vote.mode for vote in votes if vote.shape.num_tokens}
    if RuntimeMode.NONE not in modes:
        key = choose(shape, keys)
        if key is not None:
            return _decision(votes, key, DecisionReason.GRAPH)
    mixed = RuntimeMode.NONE in modes and len(modes) > 1
    reason = DecisionReason.RANK_EAGER if mixed else DecisionReason.NO_FIT
    return _decision(votes, eager_key(shape.num_tokens), reason)


def eager_key(num_tokens: int, num_microbatches: int = 1) -> GraphKey:
    """Returns the key of a step that runs without a graph and without padded requests."""
    return GraphKey(mode=RuntimeMode.NONE, num_tokens=num_tokens, num_microbatches=num_microbatches)


def widest(votes: Sequence[StepVote]) -> BatchShape:
    """Returns the shape that covers all ranks; uniform only if the busy ones share one length."""
    shapes = [vote.shape for vote in votes if vote.shape.num_tokens]
    uniform = {shape.uniform_query_len for shape in shapes}
    prefills = max((shape.num_prefills for shape in shapes), default=0)
    # r * q can equal t by chance over unlike ranks; a prefill marks the union as not uniform.
    agreed = len(uniform) == 1 and None not in uniform
    return BatchShape(
        num_reqs=max((shape.num_reqs for shape in shapes), default=0),
        num_tokens=max((shape.num_tokens for shape in shapes), default=0),
        max_query_len=max((shape.max_query_len for shape in shapes), default=0),
        num_prefills=prefills if agreed else max(prefills, 1),
    )


def _all_want_split(votes: Sequence[StepVote], shape: BatchShape, config: MicrobatchConfig) -> bool:
    uniform = shape.uniform_query_len is not None
    fewest = min(vote.shape.num_tokens for vote in votes)
    wish = all(vote.wants_microbatch for vote in votes)
    return wish and wants_split(fewest, uniform=uniform, config=config)


def _decide_split(
    votes: Sequence[StepVote],
    shape: BatchShape,
    keys: Collection[GraphKey],
    config: MicrobatchConfig,
) -> StepDecision | None:
    """A twin, an eager split or their refusal; None when a plain key should serve instead."""
    num_microbatches = config.num_microbatches
    fewest = min(vote.shape.num_tokens for vote in votes)
    twin = choose(shape, keys, num_microbatches=num_microbatches)
    if twin is None and shape.uniform_query_len is not None and choose(shape, keys) is not None:
        return None
    target = twin or eager_key(shape.num_tokens, num_microbatches)
    if not last_microbatch_is_empty(fewest, target.num_tokens, num_microbatches):
        reason = DecisionReason.NO_FIT if twin is None else DecisionReason.GRAPH
        return _decision(votes, target, reason)
    if config.spread_real_tokens and can_spread(shape, target, fewest):
        return _decision(votes, target, DecisionReason.SPREAD)
    plain = choose(shape, (key for key in keys if key.num_tokens == target.num_tokens))
    return _decision(votes, plain or eager_key(shape.num_tokens), DecisionReason.EMPTY_MICROBATCH)


def _decision(votes: Sequence[StepVote], key: GraphKey, reason: DecisionReason) -> StepDecision:
    return StepDecision(
        key=key, tokens_per_rank=tuple(vote.shape.num_tokens for vote in votes), reason=reason
    )


def _preference(key: GraphKey) -> tuple[int, int, bool, bool, int]:
    """Tells any two keys that fit one batch apart, so that the order of keys cannot matter."""
    general, unpadded = key.uniform_query_len is None, key.num_reqs is None
    return (key.num_tokens, -key.mode, general, unpadded, key.num_reqs or 0)
