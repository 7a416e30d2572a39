"""Two scores of one task -> a verdict: by a paired test on items, else by their standard errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

import numpy as np

from cgprof.record.scores import AccuracyResult, ItemScore, PairedVerdict
from cgprof.stats.paired import (
    ALPHA,
    detectable_difference,
    detectable_paired,
    detectable_unpaired,
    mcnemar_exact,
    mean_interval,
    paired_bootstrap,
    unpaired_p,
)

ACCURACY_RESOLUTION = 0.10
LIKELIHOOD_RESOLUTION = 0.005
FEWEST_ANSWERS = 100
FEWEST_LIKELIHOODS = 30
_ACCURACY_RULE = (
    f"different: p below {ALPHA:.2f}; same: no detectable difference, of {FEWEST_ANSWERS} items or "
    f"more that would show one of {ACCURACY_RESOLUTION:.0%} with 80 % power; all else is "
    "inconclusive"
)
_LIKELIHOOD_RULE = (
    "different: the 95 % interval excludes 0 and the mean moves by more than "
    f"{LIKELIHOOD_RESOLUTION} nats a token, or only one of the two is finite; same: the interval "
    f"lies within that; all else, and fewer than {FEWEST_LIKELIHOODS} items, is inconclusive"
)
_COMMON_RULE = (
    "; unlike subsets are inconclusive; a score without a replay of the kind that it is about is "
    "not verified"
)
_Pairs = Sequence[tuple[ItemScore, ItemScore]]
_Test = Literal["mcnemar-exact", "paired-bootstrap", "unpaired-z", "none"]
_Word = Literal["same", "different", "inconclusive", "not verified"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What a test says; fields as in `PairedVerdict`."""

    test: _Test
    verdict: _Word
    delta: float | None = None
    low: float | None = None
    high: float | None = None
    only_a: int | None = None
    only_b: int | None = None
    p_value: float | None = None
    detectable: float | None = None
    seed: int | None = None


def paired_verdict(
    a: AccuracyResult,
    items_a: Sequence[ItemScore],
    b: AccuracyResult,
    items_b: Sequence[ItemScore],
    *,
    names: tuple[str, str] = ("A", "B"),
    seed: int = 0,
) -> PairedVerdict:
    """Returns what the scores of one task say of A and B; the rule stands in the verdict.

    Args:
        a: One score.
        items_a: Its items, in any order; empty where they were not kept.
        b: The other score, of the same task and kind.
        items_b: Its items.
        names: What A and B are called.
        seed: Of the bootstrap.
    """
    flags = unlike(a, b)
    pairs = [] if flags else _pairs(a, items_a, b, items_b)
    judge = _likelihood if a.kind == "likelihood" else _accuracy
    found = judge(a, b, pairs, seed)
    if flags:
        found = replace(found, verdict="inconclusive")
    if False in (a.verified, b.verified):
        found = replace(found, verdict="not verified")
    return PairedVerdict(
        task=a.task,
        kind=a.kind,
        a=names[0],
        b=names[1],
        n_a=a.n,
        n_b=b.n,
        value_a=a.value,
        value_b=b.value,
        items_different=sum(_differs(x, y) for x, y in pairs) if pairs else None,
        flags=flags,
        rule=(_LIKELIHOOD_RULE if a.kind == "likelihood" else _ACCURACY_RULE) + _COMMON_RULE,
        **asdict(found),
    )


def unlike(a: AccuracyResult, b: AccuracyResult) -> tuple[str, ...]:
    """Returns in words why two scores are not of the same items, asked and scored alike."""
    found = tuple(
        f"{name}: {one} in A, {other} in B"
        for name, one, other in (
            ("n", a.n, b.n),
            ("subset", a.subset_rule, b.subset_rule),
            ("seed", a.seed, b.seed),
            ("prompts", a.prompt_rule, b.prompt_rule),
            ("scoring", a.scoring_rule, b.scoring_rule),
        )
        if one != other
    )
    if not found and a.items_fingerprint != b.items_fingerprint:
        return ("items: other prompts or golds under the same rule",)
    return found


def _pairs(
    a: AccuracyResult,
    items_a: Sequence[ItemScore],
    b: AccuracyResult,
    items_b: Sequence[ItemScore],
) -> _Pairs:
    """The items of both, matched by id; nothing where either lacks some of them."""
    others = {item.item_id: item for item in items_b}
    pairs = [(item, others[item.item_id]) for item in items_a if item.item_id in others]
    return pairs if len(pairs) == a.n == b.n else []


def _differs(a: ItemScore, b: ItemScore) -> bool:
    return (a.token_ids, a.score, a.choice_scores) != (b.token_ids, b.score, b.choice_scores)


def _accuracy(a: AccuracyResult, b: AccuracyResult, pairs: _Pairs, seed: int) -> _Found:
    if not pairs:
        right = (a.correct or 0) + (b.correct or 0)
        # Two right and two wrong answers more, so that a score of 0 or 1 keeps an error.
        share = (right + 2) / (a.n + b.n + 4)
        found = replace(_unpaired(a, b), detectable=detectable_unpaired(share, a.n, b.n))
    else:
        found = _mcnemar(pairs, seed)
    if found.p_value is None:
        return found
    if found.p_value < ALPHA:
        return replace(found, verdict="different")
    seen = found.detectable is not None and found.detectable <= ACCURACY_RESOLUTION
    enough = min(a.n, b.n) >= FEWEST_ANSWERS
    return replace(found, verdict="same" if seen and enough else "inconclusive")


def _mcnemar(pairs: _Pairs, seed: int) -> _Found:
    moves = np.array([bool(y.correct) - bool(x.correct) for x, y in pairs], np.float64)
    only_a, only_b = int((moves < 0).sum()), int((moves > 0).sum())
    delta, low, high = paired_bootstrap(moves, seed)
    return _Found(
        test="mcnemar-exact",
        verdict="inconclusive",
        delta=delta,
        low=low,
        high=high,
        only_a=only_a,
        only_b=only_b,
        p_value=mcnemar_exact(only_a, only_b),
        detectable=detectable_paired(only_a + only_b, len(pairs)),
        seed=seed,
    )


def _likelihood(a: AccuracyResult, b: AccuracyResult, pairs: _Pairs, seed: int) -> _Found:
    if a.nonfinite or b.nonfinite:
        one_sided = not (a.nonfinite and b.nonfinite)
        return _Found(test="none", verdict="different" if one_sided else "inconclusive")
    found = _bootstrap(pairs, seed) if pairs else _unpaired(a, b)
    if found.delta is None or found.low is None or found.high is None:
        return found
    if min(a.n, b.n) < FEWEST_LIKELIHOODS:
        return found
    excludes_zero = found.low > 0 or found.high < 0
    if excludes_zero and abs(found.delta) > LIKELIHOOD_RESOLUTION:
        return replace(found, verdict="different")
    within = max(-found.low, found.high) <= LIKELIHOOD_RESOLUTION
    return replace(found, verdict="same" if within else "inconclusive")


def _bootstrap(pairs: _Pairs, seed: int) -> _Found:
    """By how much B's negative log-likelihood a token is above A's, over items."""
    num_tokens = np.array([len(item.token_ids) for item, _ in pairs], np.float64)
    scores_a = np.array([item.score for item, _ in pairs], np.float64)
    scores_b = np.array([item.score for _, item in pairs], np.float64)
    differences = (scores_a - scores_b) / num_tokens.mean()
    delta, low, high = paired_bootstrap(differences, seed)
    error = float(differences.std(ddof=1)) / len(pairs) ** 0.5 if len(pairs) > 1 else None
    return _Found(
        test="paired-bootstrap",
        verdict="inconclusive",
        delta=delta,
        low=low,
        high=high,
        detectable=None if error is None else detectable_difference(error),
        seed=seed,
    )


def _unpaired(a: AccuracyResult, b: AccuracyResult) -> _Found:
    if a.value is None or b.value is None or a.se is None or b.se is None:
        return _Found(test="none", verdict="inconclusive")
    delta, error = b.value - a.value, float(np.hypot(a.se, b.se))
    low, high = mean_interval(delta, error)
    return _Found(
        test="unpaired-z",
        verdict="inconclusive",
        delta=delta,
        low=low,
        high=high,
        p_value=unpaired_p(delta, a.se, b.se),
        detectable=detectable_difference(error),
    )
