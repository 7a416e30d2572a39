"""Lines about the accuracy of a task: never without size, interval, origin and replays."""

from __future__ import annotations

from cgprof.record.scores import AccuracyResult, PairedVerdict
from cgprof.record.types import RunRecord
from cgprof.report.layout import one_line

NOT_VERIFIED = "not verified"


def accuracy_line(record: RunRecord) -> str:
    """Returns one line: each phase's score with its interval and the verdict, or why there is none.

    Empty for a run that was never asked.
    """
    if not record.accuracy:
        return one_line(record.accuracy_note)
    first = record.accuracy[0]
    scores = ", ".join(f"{result.phase} {score_text(result)}" for result in record.accuracy)
    verdicts = "; ".join(verdict_text(verdict) for verdict in record.verdicts)
    return f"{measure_of(first)} of {one_line(first.task)}, n {first.n}: {scores}; {verdicts}"


def measure_of(result: AccuracyResult) -> str:
    """Returns what the value of a score is."""
    return "negative log-likelihood a token" if result.kind == "likelihood" else "accuracy"


def score_text(result: AccuracyResult) -> str:
    """Returns value and interval; a replay score without its kind of replay is not verified."""
    if result.value is None:
        return "not finite"
    text = f"{result.value:.4g}"
    if result.low is not None and result.high is not None:
        text += f" [{result.low:.4g}, {result.high:.4g}]"
    return f"{text} ({NOT_VERIFIED})" if result.verified is False else text


def verdict_text(verdict: PairedVerdict) -> str:
    """Returns what a paired test says of two scores, and what it was able to see."""
    facts = [f"{verdict.b} against {verdict.a}: {verdict.verdict}"]
    if verdict.items_different is not None:
        facts.append(f"{verdict.items_different} of {verdict.n_b} items differ")
    if verdict.only_a is not None and verdict.only_b is not None:
        facts.append(
            f"right in one alone: {verdict.only_a} {verdict.a}, {verdict.only_b} {verdict.b}"
        )
    if verdict.p_value is not None:
        facts.append(f"{verdict.test} p {verdict.p_value:.3g}")
    if verdict.delta is not None and verdict.test == "paired-bootstrap":
        facts.append(f"difference {verdict.delta:.3g}")
    if verdict.detectable is not None:
        facts.append(f"detectable {verdict.detectable:.2g}")
    return one_line(", ".join([*facts, *verdict.flags]))


def coverage_text(result: AccuracyResult) -> str:
    """Returns how many scored tokens came from replays of plain graphs, of twins, and eager."""
    steps = sum(result.replays.values())
    return (
        f"{result.tokens_plain} scored tokens from plain replays, {result.tokens_twin} from twins, "
        f"{result.tokens_eager} eager; {steps} replays of {len(result.replays)} keys"
    )
