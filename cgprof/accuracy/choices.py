"""Rows of multiple-choice data sets, in the spellings that are about, as one form."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cgprof.errors import ConfigError

_LETTERED = re.compile(r"^([A-Z])[.)] ?", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRow:
    """A question, its choices, and the index of the right one."""

    question: str
    choices: tuple[str, ...]
    right: int


def choice_row(row: Mapping[str, object], where: str) -> ChoiceRow:
    """Returns a row of either form.

    The right choice is an index, the whole text of a choice, or its letter, looked for in this
    order; texts lose the blanks around them.

    Raises:
        ConfigError: A field is missing or of another kind, or names no choice.
    """
    if "goal" in row:
        question, answer = row["goal"], row.get("label")
        listed: Sequence[object] = [row.get("sol1"), row.get("sol2")]
    else:
        question, answer = row.get("question"), row.get("answer")
        listed = _listed(row, where)
    choices = _texts(listed, where)
    if not isinstance(question, str):
        raise ConfigError(where, f"the question is {question!r} and not a text")
    if len(choices) < 2:
        raise ConfigError(where, f"has {len(choices)} choices; two or more are needed")
    return ChoiceRow(question=question, choices=choices, right=_right(answer, choices, where))


def _listed(row: Mapping[str, object], where: str) -> Sequence[object]:
    listed = row.get("choices", row.get("options"))
    if isinstance(listed, str):
        starts = list(_LETTERED.finditer(listed))
        bounds = [start.start() for start in starts] + [len(listed)]
        return [listed[start.end() : end] for start, end in zip(starts, bounds[1:], strict=True)]
    if not isinstance(listed, list):
        raise ConfigError(
            where,
            "needs goal, sol1, sol2, label, or question, answer and a list of choices (or options "
            "in lettered lines)",
        )
    return listed


def _texts(values: Sequence[object], where: str) -> tuple[str, ...]:
    texts = []
    for value in values:
        if not (isinstance(value, str) and value.strip()):
            raise ConfigError(where, f"a choice is {value!r} and not a text")
        texts.append(value.strip())
    return tuple(texts)


def _right(answer: object, choices: tuple[str, ...], where: str) -> int:
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    if isinstance(answer, str):
        text = answer.strip()
        for candidate in (text, _LETTERED.sub("", text, count=1).strip()):
            if candidate in choices:
                return choices.index(candidate)
        letter = ord(text) - ord("A") if len(text) == 1 else -1
        if 0 <= letter < len(choices):
            return letter
    raise ConfigError(
        where, f"the answer {answer!r} names none of {len(choices)} choices (a test set has none)"
    )
