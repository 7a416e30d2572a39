"""One text for equal values on all ranks, and its hash; `hash()` would differ by process."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from pathlib import Path

from pydantic import BaseModel

from cgprof.record.environment import code_fingerprint

_PACKAGE = Path(__file__).parents[1]


def canonical_json(value: object) -> str:
    """Returns the JSON of plain values, dataclasses and pydantic models, with keys in order."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)


def canonical_hash(value: object) -> int:
    """Returns 64 bits of the SHA-256 of a value's canonical JSON."""
    return int.from_bytes(hashlib.sha256(canonical_json(value).encode()).digest()[:8], "big")


@functools.cache
def code_version() -> str:
    """Returns a hash of this package's source, which has to be one on all ranks."""
    return code_fingerprint(_PACKAGE)


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no canonical JSON")
