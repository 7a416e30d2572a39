"""What a check found: a verdict with its reasons, every key with its replays, and each leg."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from cgprof.record.graph import GraphRecord
from cgprof.record.scores import (
    CheckRecord,
    GreedyResult,
    PlantedFault,
    TokenDivergence,
    WeightsResult,
)
from cgprof.record.types import RunRecord
from cgprof.report.accuracy import accuracy_line, verdict_text
from cgprof.report.document import Block, Document, Lines
from cgprof.report.headline import recorder_line
from cgprof.report.layout import Cell, Table, one_line
from cgprof.report.parity import FAIL, LEGS, NOT_VERIFIED, PASS, leg_verdict, legs_table
from cgprof.report.scores import scores_table, verdicts_table

_MOST_DIVERGENCES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A word for a whole check, and what speaks against a pass."""

    word: Literal["pass", "FAIL", "not verified", "inconclusive"]
    reasons: tuple[str, ...] = ()


def check_verdict(record: RunRecord) -> Verdict:
    """Returns FAIL if any leg failed; without a verdict of every leg it is not a pass either."""
    failed = tuple(_failed(record))
    if failed:
        return Verdict(word="FAIL", reasons=failed)
    reasons = tuple(_open(record))
    if any(NOT_VERIFIED in reason for reason in reasons):
        return Verdict(word="not verified", reasons=reasons)
    return Verdict(word="inconclusive" if reasons else "pass", reasons=reasons)


def check_document(record: RunRecord) -> Document:
    """Returns a check: the verdict first, then what it rests on."""
    verdict = check_verdict(record)
    graphs = [graph for rank in record.ranks for graph in rank.graphs]
    keys, legs = keys_table(record), legs_table(graphs)
    scores, verdicts = scores_table(record.accuracy), verdicts_table(record.verdicts)

    def data() -> object:
        return {
            "verdict": verdict.word,
            "reasons": verdict.reasons,
            "keys": keys.records() if record.check else [],
            "run": record.model_dump(mode="json"),
        }

    blocks = check_blocks(
        record,
        legs=[legs],
        scores=[
            Lines(lines=[accuracy_line(record) or "no task was scored"]),
            *([scores] if record.accuracy else []),
        ],
    )
    return Document(
        blocks=[*blocks, Lines(lines=[recorder_line(record)])],
        tables=[keys, legs, scores, verdicts],
        data=data,
    )


def check_blocks(
    record: RunRecord, *, legs: Sequence[Block] = (), scores: Sequence[Block] = ()
) -> list[Block]:
    """Returns a check for reading; legs and scores are left out where a report has its own."""
    check = record.check
    if check is None:
        return [Lines(lines=["not checked"])]
    verdict = check_verdict(record)
    head = [f"check: {verdict.word}{_partial(check)}", *map(one_line, verdict.reasons)]
    blocks: list[Block] = [Lines(lines=head), keys_table(record), *legs]
    if check.greedy is not None:
        blocks.append(Lines(lines=greedy_lines(check.greedy)))
    if check.weights is not None:
        blocks.append(Lines(lines=[weights_line(check.weights)]))
    blocks += scores
    if check.plant is not None:
        blocks.append(Lines(lines=plant_lines(check.plant)))
    return blocks


def keys_table(record: RunRecord) -> Table:
    """Returns each key's verdicts with the replays that stand behind them."""
    check = record.check
    greedy = check.greedy.replays if check and check.greedy else {}
    task = {label: n for result in record.accuracy for label, n in result.replays.items()}
    rows: list[tuple[Cell, ...]] = []
    for graph in (graph for rank in record.ranks for graph in rank.graphs):
        verdicts: dict[str, str] = {leg.leg: leg_verdict(leg) for leg in graph.parity}
        if graph.failure:
            words: list[Cell] = ["not captured"] * len(LEGS)
        else:
            words = [verdicts.get(leg, "not checked") for leg in LEGS]
        replays = max((leg.replays for leg in graph.parity), default=0)
        rows.append(
            (graph.label, *words, replays, greedy.get(graph.label, 0), task.get(graph.label, 0))
        )
    return Table(
        name="checks",
        title="keys",
        columns={
            "key": "key",
            **{leg: leg for leg in LEGS},
            "parity_replays": "parity replays",
            "greedy_replays": "greedy replays",
            "task_replays": "task replays",
        },
        rows=tuple(rows),
        notes=("a verdict without a replay is 'not verified', never a pass",),
    )


def greedy_lines(greedy: GreedyResult) -> list[str]:
    """Returns a greedy run: verdict and size, first differences, and eager's own noise."""
    word = _word(greedy.passed)
    replayed = sum(greedy.replays.values())
    lines = [
        f"greedy: {word}: {greedy.requests} requests in {greedy.steps} steps, {replayed} of them "
        f"replays of {len(greedy.replays)} keys, contexts up to {greedy.longest_context}",
        f"{greedy.tokens_compared} tokens, {len(greedy.divergences)} requests part from eager at "
        f"equal padding; best logits at most {_number(greedy.max_logit_diff)} apart, "
        f"{greedy.nonfinite} values not finite",
        *_divergences(greedy.divergences, "replay", "eager"),
        f"noise floor, eager padded against unpadded: {len(greedy.noise_divergences)} requests "
        f"part; best logits at most {_number(greedy.noise_logit_diff)} apart",
        *_divergences(greedy.noise_divergences, "padded", "unpadded"),
    ]
    if greedy.identical:
        lines.append(
            f"{greedy.identical} identical prompts side by side: {greedy.identical_outputs} "
            f"output{'s' if greedy.identical_outputs > 1 else ''} by replay, "
            f"{greedy.identical_outputs_eager} eager (kernels that are not batch-invariant may "
            "give several, eager as well)"
        )
    return [*lines, *([one_line(greedy.note)] if greedy.note else [])]


def weights_line(weights: WeightsResult) -> str:
    """Returns whether the weights are those of their source, and the first that are not."""
    word = _word(weights.passed)
    line = f"weights: {word}: {weights.tensors} tensors read again from {weights.source}"
    if weights.different:
        line += f", {len(weights.different)} differ: {_list(weights.different[:3])}"
    return one_line("; ".join([line, *([weights.note] if weights.note else [])]))


def plant_lines(plant: PlantedFault) -> list[str]:
    """Returns what was stated of a planted fault, what it did, and what the task would tell."""
    lines = [
        f"planted in {plant.place}: {plant.name}: {plant.what}",
        f"stated: red {_list(plant.stated_red)}; green {_list(plant.stated_green)}",
        f"found:  red {_list(plant.red)}; green {_list(plant.green)}",
        f"as stated: {'yes' if plant.as_stated else 'NO'}",
    ]
    if plant.task is None:
        return [*lines, "the task alone: not scored"]
    noticed = "would notice" if plant.task.verdict == "different" else "would not notice"
    values = f"{_number(plant.task.value_a)} clean, {_number(plant.task.value_b)} faulty"
    return [*lines, f"the task alone {noticed}: {values}; {verdict_text(plant.task)}"]


def _failed(record: RunRecord) -> Iterable[str]:
    for failure in record.failures:
        yield f"{failure.where} failed: {failure.message}"
    for graph in _graphs(record):
        if graph.failure:
            yield f"{graph.label}: not captured: {graph.failure}"
        legs = [leg.leg for leg in graph.parity if leg_verdict(leg) == FAIL]
        if legs:
            yield f"{graph.label}: {', '.join(legs)}"
    check = record.check
    if check is not None and check.greedy is not None and check.greedy.passed is False:
        yield f"greedy: {check.greedy.note or 'tokens differ from eager at equal padding'}"
    if check is not None and check.weights is not None and check.weights.passed is False:
        yield weights_line(check.weights)
    for verdict in record.verdicts:
        if verdict.verdict == "different":
            yield f"task: {verdict_text(verdict)}"


def _open(record: RunRecord) -> Iterable[str]:
    check = record.check
    if check is None or not check.captured:
        yield "not verified: nothing was captured"
        return
    for graph in _graphs(record):
        legs = [leg.leg for leg in graph.parity if leg_verdict(leg) == NOT_VERIFIED]
        if legs:
            yield f"{graph.label}: not verified: {', '.join(legs)}"
    if check.greedy is not None and check.greedy.passed is None:
        yield f"greedy: {check.greedy.note}"
    for verdict in record.verdicts:
        if verdict.verdict in ("inconclusive", "not verified"):
            yield f"task: {verdict_text(verdict)}"


def _partial(check: CheckRecord) -> str:
    if check.sample_seed is None:
        return ""
    return (
        f", partial: {len(check.checked)} of {check.captured} keys drawn with seed "
        f"{check.sample_seed}"
    )


def _divergences(found: Sequence[TokenDivergence], mine: str, other: str) -> list[str]:
    lines = [
        f"  {one_line(one.request)}, token {one.index}: {one.tokens[0]} {mine}, {one.tokens[1]} "
        f"{other}; logit gap {_number(one.gaps[0])} and {_number(one.gaps[1])}"
        f"{', within the noise' if one.explained else ''}"
        for one in found[:_MOST_DIVERGENCES]
    ]
    more = len(found) - _MOST_DIVERGENCES
    return [*lines, f"  and {more} more"] if more > 0 else lines


def _graphs(record: RunRecord) -> list[GraphRecord]:
    return [graph for rank in record.ranks for graph in rank.graphs]


def _word(passed: bool | None) -> str:
    if passed is None:
        return NOT_VERIFIED
    return PASS if passed else FAIL


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
