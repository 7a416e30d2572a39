"""Tasks: which items are asked, in which words, and by which rule they were chosen.

Every file is JSON lines. A row with `question` and `answer` is a worded problem whose solution
ends in `#### n`; one with `goal`, `sol1`, `sol2` and `label`, or with `question`, `choices` (or
lettered lines in `options`) and `answer`, is a multiple choice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from cgprof.accuracy.answers import MARKER, extract_answer
from cgprof.accuracy.arithmetic import problems
from cgprof.accuracy.choices import ChoiceRow, choice_row
from cgprof.accuracy.shots import EXAMPLES
from cgprof.errors import ConfigError

TaskKind = Literal["generate", "likelihood", "multiple-choice"]
Match = Literal["number", "exact"]

ARITHMETIC = "arithmetic"
_ARITHMETIC_COUNT = 200
_SHOTS = len(EXAMPLES)
_WORDED_NEW_TOKENS = 320
_NEXT_QUESTION = "\nQuestion:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One question. `gold` is what follows the prompt, a number, or the right choice."""

    item_id: str
    prompt: str
    gold: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Items of one kind; the rules say how they were chosen and put into words."""

    name: str
    kind: TaskKind
    items: tuple[Item, ...]
    subset_rule: str
    prompt_rule: str
    seed: int | None = None
    match: Match = "exact"  # how a generated text is compared with the gold
    stop: str = ""  # a generated text ends before this
    max_new_tokens: int = 0


def load_task(
    name_or_path: str,
    *,
    kind: TaskKind | None = None,
    limit: int | None = None,
    seed: int | None = None,
    shots: int | None = None,
) -> Task:
    """Returns `arithmetic`, or the task in a file of JSON lines.

    Args:
        name_or_path: The name or the path.
        kind: Left out: what the rows are best for. Worded problems and arithmetic serve for
            generation (left out) and for likelihood.
        limit: How many items; left out: all of a file, 200 generated ones.
        seed: With a limit, draws the items; without a seed the first ones of a file are taken.
        shots: Solved examples before a worded problem; left out: all for generation, else none.

    Raises:
        ConfigError: No such file, a row that cannot be read, or a kind that it cannot serve.
    """
    if limit is not None and limit < 1:
        raise ConfigError(name_or_path, f"{limit} items were asked for; ask for 1 or more")
    if name_or_path == ARITHMETIC:
        return _arithmetic(kind or "generate", limit or _ARITHMETIC_COUNT, seed or 0)
    path = Path(name_or_path)
    rows = _read_rows(path)
    chosen, rule = _subset(len(rows), limit, seed)
    drawn = seed if limit is not None else None
    picked = [(f"{path}:{index + 1}", index, rows[index]) for index in chosen]
    if "answer" in rows[0] and not {"choices", "options"} & rows[0].keys():
        task_kind = kind or "generate"
        count = _shots(str(path), shots, task_kind)
        items = [_worded(task_kind, count, *row) for row in picked]
        return _worded_task(path.stem, task_kind, items, rule, drawn, count)
    if kind not in (None, "multiple-choice"):
        raise ConfigError(str(path), f"its rows are multiple choices and do not serve for {kind}")
    return Task(
        name=path.stem,
        kind="multiple-choice",
        items=tuple(_choice(*row) for row in picked),
        subset_rule=rule,
        prompt_rule="zero-shot",
        seed=drawn,
    )


def _arithmetic(kind: TaskKind, count: int, seed: int) -> Task:
    if kind == "multiple-choice":
        raise ConfigError(ARITHMETIC, "it has no choices; ask for generate or likelihood")
    drawn = problems(count, seed=seed, split="held-out")
    return Task(
        name=ARITHMETIC,
        kind=kind,
        items=tuple(
            Item(item_id=problem.question, prompt=problem.question, gold=problem.answer)
            for problem in drawn
        ),
        subset_rule=f"{count} held-out problems generated with seed {seed}",
        prompt_rule="the question alone",
        seed=seed,
        max_new_tokens=1 + max(len(problem.answer) for problem in drawn),
    )


def _worded_task(
    name: str, kind: TaskKind, items: Sequence[Item], rule: str, seed: int | None, shots: int
) -> Task:
    return Task(
        name=name,
        kind=kind,
        items=tuple(items),
        subset_rule=rule,
        prompt_rule=f"{shots} of {_SHOTS} fixed examples first" if shots else "zero-shot",
        seed=seed,
        match="number",
        stop=_NEXT_QUESTION,
        max_new_tokens=_WORDED_NEW_TOKENS,
    )


def _worded(kind: TaskKind, shots: int, where: str, index: int, row: Mapping[str, object]) -> Item:
    question, answer = row.get("question"), row.get("answer")
    if not (isinstance(question, str) and isinstance(answer, str)):
        raise ConfigError(where, "question and answer must both be text")
    final = answer.rpartition(MARKER)
    if not final[1] or extract_answer(final[2]) is None:
        raise ConfigError(where, f"the answer does not end in '{MARKER} n'")
    examples = "".join(_question(q) + f" {a}\n\n" for q, a in EXAMPLES[:shots])
    gold = f" {answer}" if kind == "likelihood" else final[2].strip()
    return Item(item_id=str(index), prompt=examples + _question(question), gold=gold)


def _choice(where: str, index: int, row: Mapping[str, object]) -> Item:
    found: ChoiceRow = choice_row(row, where)
    choices = tuple(f" {text}" for text in found.choices)
    return Item(
        item_id=str(index),
        prompt=_question(found.question),
        gold=choices[found.right],
        choices=choices,
    )


def _question(text: str) -> str:
    return f"Question: {text.strip()}\nAnswer:"


def _shots(where: str, shots: int | None, kind: TaskKind) -> int:
    if kind == "multiple-choice":
        raise ConfigError(where, "its rows have no choices; ask for generate or likelihood")
    count = (_SHOTS if kind == "generate" else 0) if shots is None else shots
    if not 0 <= count <= _SHOTS:
        raise ConfigError(where, f"{count} examples were asked for, there are {_SHOTS}")
    return count


def _subset(total: int, limit: int | None, seed: int | None) -> tuple[list[int], str]:
    if limit is None or limit >= total:
        return list(range(total)), f"all {total}"
    if seed is None:
        return list(range(limit)), f"first {limit} of {total}"
    drawn = np.random.default_rng(seed).permutation(total)[:limit]
    return sorted(drawn.tolist()), f"{limit} of {total} drawn with seed {seed}"


def _read_rows(path: Path) -> list[dict[str, object]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(str(path), f"the data set cannot be read: {problem}") from error
    rows = [_row(f"{path}:{i}", line) for i, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise ConfigError(str(path), "the data set is empty")
    return rows


def _row(where: str, line: str) -> dict[str, object]:
    try:
        row: object = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(where, f"is not JSON: {error.msg}") from error
    if not isinstance(row, dict):
        raise ConfigError(where, f"is not a JSON object but {type(row).__name__}")
    return row
