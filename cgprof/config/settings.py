"""Settings by dotted path, each with where it came from, and their validation as a RunConfig."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel, ValidationError

from cgprof.config.flags import spell
from cgprof.config.schema import RunConfig
from cgprof.errors import ConfigError


class Settings:
    """Layers of settings; a later layer wins, setting by setting."""

    def __init__(self) -> None:
        self._values: dict[str, object] = {}
        self._origins: dict[str, str] = {}

    def __contains__(self, path: str) -> bool:
        return path in self._values

    def add(self, layer: Mapping[str, object], origin: str = "") -> None:
        """Lays a layer on top; `origin` is how its errors begin, empty for flags.

        Raises:
            ConfigError: Its tables lie too deep.
        """
        try:
            leaves = dict(_leaves(layer))
        except RecursionError as error:
            raise ConfigError(origin.rstrip(" :") or "settings", "tables lie too deep") from error
        self._values |= leaves
        self._origins |= dict.fromkeys(leaves, origin)

    def spell(self, path: str) -> str:
        """Returns a setting as its errors name it: origin, path, and flag where it has one."""
        setting = self._written(path.partition("[")[0])
        return self._origins.get(setting, "") + spell(path)

    def error(self, path: str, problem: str) -> ConfigError:
        """Returns the error of a setting."""
        return ConfigError(self.spell(path), problem)

    def validate(self) -> RunConfig:
        """Returns the settings as a config; types are taken as written, nothing is converted.

        Raises:
            ConfigError: The first setting that is unknown or wrong.
        """
        tree = self._tree()
        for path, value in self._values.items():
            try:
                json.dumps([path, value], default=str, ensure_ascii=False).encode()
            except (ValueError, RecursionError) as error:
                raise self.error(path, f"no such value: {error}") from error
        try:
            return RunConfig.model_validate_json(json.dumps(tree, default=str), strict=True)
        except RecursionError as error:
            raise ConfigError("settings", "tables lie too deep") from error
        except ValidationError as error:
            raise self._translate(error) from error

    def _tree(self) -> dict[str, object]:
        tree: dict[str, object] = {}
        for path, value in self._values.items():
            node = tree
            *parents, leaf = path.split(".")
            for depth, part in enumerate(parents, start=1):
                child = node.setdefault(part, {})
                if not isinstance(child, dict):
                    raise self.error(
                        ".".join(parents[:depth]), f"{child!r} is no table, but {path} is set"
                    )
                node = child
            if isinstance(node.get(leaf), dict):
                if value == {}:
                    continue
                raise self.error(path, f"{value!r} is given where a table of settings belongs")
            node[leaf] = value
        return tree

    def _translate(self, error: ValidationError) -> ConfigError:
        first = error.errors(include_url=False)[0]
        path = ""
        for part in first["loc"]:
            path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
        if first["type"] == "extra_forbidden":
            written = self._written(path)
            nearest = nearest_setting(written) or nearest_setting(path)
            hint = "" if nearest is None else f"; did you mean {nearest}?"
            return self.error(written, f"no such setting{hint}")
        if first["type"] == "model_type":
            return self.error(path, f"{first['input']!r} is given where a table belongs")
        if first["type"] == "value_error":
            return self.error(path, str(first["ctx"]["error"]))
        wish = first["msg"][0].lower() + first["msg"][1:]
        return self.error(path, f"{first['input']!r}: {wish}")

    def _written(self, path: str) -> str:
        """An unknown key as it was written; of an unknown table, its first setting."""
        return next((known for known in self._values if known.startswith(f"{path}.")), path)


def read_toml(path: Path) -> dict[str, object]:
    """Returns the tables of a TOML file.

    Raises:
        ConfigError: It cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), "is not a text file") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(path), f"is not TOML: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(str(path), f"cannot be read: {error}") from error


def parse_assignment(text: str) -> tuple[str, object]:
    """Returns path and value of `part.field=value`; what is not a TOML value is a string.

    Raises:
        ConfigError: There is no path or no '=', or the value is too large or lies too deep.
    """
    path, equals, written = text.partition("=")
    if not equals or not path.strip():
        raise ConfigError("--set", f"{text!r} is not of the form part.field=value")
    try:
        parsed = tomllib.loads(f"value = {written}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--set {path.strip()}", f"cannot be read: {error}") from error
    value = parsed["value"] if parsed.keys() == {"value"} else written
    return path.strip(), value


def known_settings() -> dict[str, str]:
    """Returns every dotted path of a RunConfig, parts and fields, with its last word."""
    return {path: path.rpartition(".")[2] for path in _paths(RunConfig)}


def nearest_setting(path: str) -> str | None:
    """Returns the known setting that an unknown one resembles most, or None."""
    known = known_settings()
    by_word = {word: full for full, word in reversed(known.items())}
    close = difflib.get_close_matches(path.rpartition(".")[2], by_word, n=1)
    return by_word[close[0]] if close else None


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _paths(field.annotation, f"{prefix}{name}.")


def _leaves(layer: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in layer.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
