"""Walks over the arguments and results of operators, through lists and tuples."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_Kind = TypeVar("_Kind")


def exchange(
    kind: type[_Kind],
    change: Callable[[_Kind], object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Returns an operation's arguments with every `kind` in them, also in lists, changed."""

    def changed(value: object) -> object:
        if isinstance(value, kind):
            return change(value)
        if isinstance(value, list):
            return [changed(item) for item in value]
        return tuple(map(changed, value)) if isinstance(value, tuple) else value

    return tuple(map(changed, args)), {name: changed(value) for name, value in kwargs.items()}


def leaves(value: object) -> list[object]:
    """Returns what is in a value, itself if it is no list and no tuple."""
    # torch's own tree functions take half of the time of a recording.
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]
