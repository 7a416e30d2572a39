"""The small real runs that are kept beside the notebooks."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from cgprof.record.store import read_run
from cgprof.record.types import RunRecord

_FOLDER = Path(__file__).resolve().parents[2] / "notebooks" / "runs"
KEPT = sorted(path.name for path in _FOLDER.iterdir() if path.name.startswith("h200-"))


@cache
def kept_run(name: str) -> RunRecord:
    return read_run(_FOLDER / name)


def stores_keys_apart(record: RunRecord) -> bool:
    """Whether the engine stored keys and values in a launch of its own, one more a layer.

    Engines so old do not name their code in the record.
    """
    return record.environment.code is None
