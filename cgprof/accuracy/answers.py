"""The number that a text answers with: the first marked one, else the last one in the text."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Literal

Grade = Literal["right", "wrong", "no answer"]

MARKER = "####"
_MINUS = "-\u2212"
_CURRENCY = "$\u20ac\u00a3\u00a5"
# A minus directly after a digit, letter or bracket is an operator or a hyphen, not a sign.
_NUMBER = re.compile(
    rf"(?:(?<![\w.)\]])(?P<sign>[{_MINUS}+]))?"
    rf"[{_CURRENCY}]?(?P<inner>(?<=[{_CURRENCY}])[{_MINUS}+])?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
)
_MARKED_LINE = re.compile(rf"{MARKER}([^\n]*)")


def extract_answer(text: str) -> Decimal | None:
    """Returns the number behind the first `####` that has one on its line, else the last number.

    Commas between thousands, a currency sign before and a full stop after a number are dropped.
    None when the text holds no number.
    """
    for marked in _MARKED_LINE.finditer(text):
        found = _NUMBER.search(marked[1])
        if found is not None:
            return _value(found)
    numbers = list(_NUMBER.finditer(text))
    return _value(numbers[-1]) if numbers else None


def grade(text: str, gold: str) -> Grade:
    """Returns whether the text answers with the number that `gold` holds."""
    answer = extract_answer(text)
    if answer is None:
        return "no answer"
    return "right" if answer == extract_answer(gold) else "wrong"


def _value(found: re.Match[str]) -> Decimal:
    value = Decimal(found["digits"].replace(",", ""))
    negative = (found["sign"] or found["inner"] or "+") in _MINUS
    return -value if negative else value
