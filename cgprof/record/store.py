"""A run folder: manifest, summary, samples, items of tasks. Readable whenever the writer dies.

Each file is written beside its name and renamed when whole, so a reader meets the last whole one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from cgprof.errors import ConfigError, RecordError
from cgprof.record.items import items_of, items_table
from cgprof.record.samples import SampleSink
from cgprof.record.types import SCHEMA_VERSION, ItemScore, RunRecord

MANIFEST = "manifest.json"
SUMMARY = "summary.json"
SAMPLES = "replays.parquet"
ITEMS = "items.parquet"  # only where a task was scored
_PART = ".part"
_OUR_FILES = (MANIFEST, SUMMARY, SAMPLES, ITEMS)


class RunWriter:
    """Writes one run's folder, again and again as the run grows."""

    def __init__(self, path: Path, *, force: bool = False) -> None:
        """Makes the folder. With `force`, an older run's files there are replaced, others kept.

        Raises:
            ConfigError: The folder is not empty and `force` is off, or it cannot be made.
        """
        self.path = path
        self.samples = SampleSink()
        self.items: list[ItemScore] = []
        try:
            path.mkdir(parents=True, exist_ok=True)
            occupied = any(path.iterdir())
            if occupied and force:
                self._remove_older_run()
        except OSError as error:
            raise ConfigError("--output-dir", f"{path}: {error.strerror}") from error
        if occupied and not force:
            raise ConfigError(
                "--output-dir", f"{path} is not empty; choose another folder or give --force"
            )

    def write(self, record: RunRecord) -> None:
        """Rewrites the folder: samples and items first, the manifest last.

        Raises:
            RecordError: The record holds NaN or infinity, or the folder cannot be written.
        """
        manifest = {
            "schema_version": record.schema_version,
            "run_id": record.run_id,
            "status": record.status,
            "files": [SUMMARY, SAMPLES, *([ITEMS] if self.items else [])],
        }
        summary = record.model_dump(mode="json")
        self._replace(SAMPLES, lambda part: pq.write_table(self.samples.table(), part))
        if self.items:
            self._replace(ITEMS, lambda part: pq.write_table(items_table(self.items), part))
        self._replace(SUMMARY, lambda part: part.write_text(self._json(SUMMARY, summary)))
        self._replace(MANIFEST, lambda part: part.write_text(self._json(MANIFEST, manifest)))

    def _remove_older_run(self) -> None:
        for name in _OUR_FILES:
            (self.path / name).unlink(missing_ok=True)
            (self.path / (name + _PART)).unlink(missing_ok=True)

    def _json(self, name: str, value: object) -> str:
        try:
            return json.dumps(value, allow_nan=False, indent=1) + "\n"
        except ValueError as error:
            raise RecordError(self.path / name, f"not written: {error}") from error

    def _replace(self, name: str, write: Callable[[Path], object]) -> None:
        part = self.path / (name + _PART)
        try:
            write(part)
            os.replace(part, self.path / name)
        except OSError as error:
            raise RecordError(self.path / name, f"cannot be written: {error.strerror}") from error


def read_run(path: Path) -> RunRecord:
    """Returns a run, finished or not.

    Raises:
        RecordError: No such folder, no run in it, damaged, or of another schema version.
    """
    if not path.is_dir():
        raise RecordError(path, "there is no such run folder")
    summary = path / SUMMARY
    if not summary.exists():
        raise RecordError(path, f"holds no run: {SUMMARY} is missing")
    value = _load_json(summary)
    version = value.get("schema_version") if isinstance(value, dict) else None
    if version != SCHEMA_VERSION:
        raise RecordError(
            summary,
            f"has schema version {version}, this cgprof reads {SCHEMA_VERSION}; "
            "read it with the version that wrote it",
        )
    try:
        return RunRecord.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RecordError(summary, f"is damaged: {where}: {first['msg']}") from error


def read_samples(path: Path) -> pd.DataFrame:
    """Returns the samples of a run, one row a step; device_ns is null without a device.

    Raises:
        RecordError: The file is missing or damaged.
    """
    samples = path / SAMPLES
    if not samples.exists():
        raise RecordError(path, f"{SAMPLES} is missing")
    try:
        frame: pd.DataFrame = pq.read_table(samples).to_pandas()
    except (pa.ArrowException, OSError) as error:
        raise RecordError(samples, f"is damaged: {str(error).splitlines()[0]}") from error
    return frame


def read_items(path: Path) -> tuple[ItemScore, ...]:
    """Returns the items of a run's tasks; none where no task was scored.

    Raises:
        RecordError: The file is damaged.
    """
    items = path / ITEMS
    if not items.exists():
        return ()
    try:
        return items_of(pq.read_table(items))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise RecordError(items, f"is damaged: {str(error).splitlines()[0]}") from error


def _load_json(path: Path) -> object:
    try:
        value: object = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RecordError(path, f"is damaged: {error}") from error
    return value
