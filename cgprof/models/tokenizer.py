"""Text to token ids and back, by the `tokenizer.json` of a model's directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from cgprof.errors import ConfigError

_FILE = "tokenizer.json"


class Tokenizer:
    """A model's tokenizer. `eos_id` is the token that ends an answer, if the model names one."""

    def __init__(self, inner: tokenizers.Tokenizer, eos_id: int | None) -> None:
        self._inner = inner
        self.eos_id = eos_id

    @classmethod
    def load(cls, directory: str | Path) -> Tokenizer:
        """Reads the tokenizer of a model's directory, and its end token from the card beside it.

        Raises:
            ConfigError: There is none, or it is damaged.
        """
        file = Path(directory) / _FILE
        inner = tokenizers.Tokenizer.from_str(_checked_text(file))
        return cls(inner, _eos_id(Path(directory), inner))

    @property
    def vocab_size(self) -> int:
        """Token ids that exist, added tokens included."""
        return self._inner.get_vocab_size()

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Returns the ids of a text; `special_tokens` adds what the tokenizer puts around it."""
        return self._inner.encode(text, add_special_tokens=special_tokens).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, without special tokens."""
        return self._inner.decode(list(ids))


def _checked_text(file: Path) -> str:
    """The library's own errors have no type to catch, so what can be wrong is looked at first."""
    if not file.is_file():
        raise ConfigError(
            str(file.parent), f"has no {_FILE}; choose a model directory that comes with one"
        )
    text = _read(file)
    content = _parse(file, text)
    model = content.get("model")
    if not isinstance(model, dict) or "vocab" not in model:
        raise ConfigError(str(file), "is not a tokenizer: it has no model with a vocab")
    return text


def _eos_id(directory: Path, inner: tokenizers.Tokenizer) -> int | None:
    for name in ("generation_config.json", "config.json"):
        found = _optional(directory / name).get("eos_token_id")
        first = found[0] if isinstance(found, list) and found else found
        if isinstance(first, int):
            return first
    token = _optional(directory / "tokenizer_config.json").get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    return inner.token_to_id(token) if isinstance(token, str) else None


def _optional(file: Path) -> dict[str, object]:
    return _parse(file, _read(file)) if file.is_file() else {}


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(str(file), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(file), "is not a text file") from error


def _parse(file: Path, text: str) -> dict[str, object]:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(str(file), f"is not JSON: line {error.lineno}: {error.msg}") from error
    if not isinstance(content, dict):
        raise ConfigError(str(file), "is not a JSON object")
    return content
