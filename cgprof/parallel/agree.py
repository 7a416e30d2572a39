"""What ranks compare outside of a step: values that must be equal, and who failed at what."""

from __future__ import annotations

import json

from cgprof.errors import RankError
from cgprof.parallel.blame import unlike
from cgprof.parallel.canonical import canonical_json
from cgprof.parallel.groups import Ranks

_SHORT = 80  # characters of a value in a message


def agree_equal(ranks: Ranks, what: str, value: object) -> None:
    """Compares a value over all ranks by its canonical JSON.

    Raises:
        RankError: Values differ; names the ranks, the first field that differs and both values.
    """
    texts = [str(text) for text in ranks.gather_objects(canonical_json(value))]
    if len(set(texts)) > 1:
        raise _difference(what, texts)


def agree_success(ranks: Ranks, problem: str | None, *, what: str = "") -> dict[int, str]:
    """Returns the problems of the ranks that had one, equal on every rank; empty if none had.

    A rank with a problem does not wait long for the others: they may be waiting for it themselves,
    in an exchange that it left.

    Args:
        ranks: This process among its peers.
        problem: This rank's problem, or None.
        what: What was attempted, such as a key's name; has to be the same on all ranks.

    Raises:
        RankError: Ranks attempted different things, or others are stuck after this rank's problem.
    """
    attempts, problems = [], {}
    try:
        gathered = ranks.gather_objects((what, problem), soon=problem is not None)
    except RankError as error:
        if problem is None:
            raise
        raise RankError(ranks.rank, f"{problem}; then the others did not go on") from error
    for rank, found in enumerate(gathered):
        assert isinstance(found, tuple)
        attempts.append(str(found[0]))
        if found[1] is not None:
            problems[rank] = str(found[1])
    if len(set(attempts)) > 1:
        raise unlike("ranks attempt different things", attempts)
    return problems


def _difference(what: str, texts: list[str]) -> RankError:
    """Narrows unlike values down to the first field in which any two of them differ."""
    values: list[object] = [json.loads(text) for text in texts]
    path = what
    while True:
        step = _first_unlike(values)
        if step is None:
            return unlike(f"{path} differs", [_short(value) for value in values])
        name, values = step
        path = f"{path}{name}"


def _first_unlike(values: list[object]) -> tuple[str, list[object]] | None:
    """The first field or item that all values have and that is not equal in all of them."""
    parts = [_parts(value) for value in values]
    for name in parts[0]:
        if all(name in part for part in parts):
            inner = [part[name] for part in parts]
            if any(one != inner[0] for one in inner):
                return name, inner
    return None


def _parts(value: object) -> dict[str, object]:
    if isinstance(value, dict):
        return {f".{name}": inner for name, inner in value.items()}
    if isinstance(value, list):
        return {f"[{index}]": inner for index, inner in enumerate(value)}
    return {}


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHORT else f"{text[:_SHORT]}... ({len(text)} characters)"
