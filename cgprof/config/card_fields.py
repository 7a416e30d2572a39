"""Reads one value of a model card under any of its names; notes where it came from.

A key that is null counts as absent. Two names of one field that disagree are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from cgprof.errors import ConfigError


class CardFields:
    """A card's keys, read by field; `sources` grows with each field that is read."""

    def __init__(self, where: str, card: Mapping[str, object]) -> None:
        self.where = where
        self.card = card
        self.sources: dict[str, str] = {}

    def error(self, problem: str) -> ConfigError:
        """Returns the error of this card."""
        return ConfigError(self.where, problem)

    def note(self, field: str, source: str) -> None:
        """Says where a field came from when no key holds it."""
        self.sources[field] = source

    def find(self, *names: str) -> tuple[str, object] | None:
        """Returns the first key that is present, and its value.

        Raises:
            ConfigError: Two of the names hold different values.
        """
        present = [(name, self.card[name]) for name in names if self.card.get(name) is not None]
        for name, value in present[1:]:
            first_name, first = present[0]
            if value != first:
                raise self.error(f"{first_name} is {first!r} but {name} is {value!r}; keep one")
        return present[0] if present else None

    def integer(self, field: str, *names: str, minimum: int = 1, default: int | None = None) -> int:
        """Returns a whole number of at least `minimum`.

        Raises:
            ConfigError: It is absent without a default, not a whole number, or too small.
        """
        found = self._found(field, names, default)
        if found is None:
            assert default is not None
            return default
        name, value = found
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(f"{name} is {value!r}, expected a whole number of at least {minimum}")
        return value

    def number(self, field: str, *names: str, default: float | None = None) -> float:
        """Returns a finite number above 0.

        Raises:
            ConfigError: It is absent without a default, or not such a number.
        """
        found = self._found(field, names, default)
        if found is None:
            assert default is not None
            return default
        return self.positive(*found)

    def boolean(self, field: str, *names: str, default: bool) -> bool:
        """Returns true or false.

        Raises:
            ConfigError: It is something else.
        """
        found = self._found(field, names, default)
        if found is None:
            return default
        name, value = found
        if not isinstance(value, bool):
            raise self.error(f"{name} is {value!r}, expected true or false")
        return value

    def positive(self, name: str, value: object) -> float:
        """Returns the value of a key as a finite number above 0.

        Raises:
            ConfigError: It is not one.
        """
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{name} is {value!r}, expected a number above 0")
        if not 0 < value <= sys.float_info.max:
            raise self.error(f"{name} is {value!r}, expected a finite number above 0")
        return float(value)

    def _found(
        self, field: str, names: tuple[str, ...], default: object
    ) -> tuple[str, object] | None:
        found = self.find(*names)
        if found is not None:
            self.note(field, found[0])
        elif default is not None:
            self.note(field, f"assumed: {default} (no {names[0]})")
        else:
            raise self.error(f"no {field}; looked for {', '.join(names)}")
        return found
