"""A run folder: manifest, summary, and a file a table. Readable whenever the writer dies.

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
from cgprof.record.lock import LOCK, FolderLock
from cgprof.record.nodes import NODES, NodeTable
from cgprof.record.samples import LATER_FIELDS, SAMPLE_SCHEMA, SampleSink
from cgprof.record.scores import ItemScore
from cgprof.record.timeline import TIMELINES, TimelineTable
from cgprof.record.types import READABLE_VERSIONS, RunRecord

MANIFEST = "manifest.json"
SUMMARY = "summary.json"
SAMPLES = "replays.parquet"
ITEMS = "items.parquet"  # only where a task was scored
_PART = ".part"


class NoFolder:
    """The writer of a rank that keeps no folder: what it is given is gathered by another."""

    def __init__(self) -> None:
        self.samples = SampleSink()
        self.items: list[ItemScore] = []
        self.nodes: NodeTable | None = None
        self.timelines: TimelineTable | None = None

    def __enter__(self) -> NoFolder:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends nothing."""

    def reserve(self) -> None:
        """Reserves nothing."""

    def claim(self) -> str:
        """Claims nothing."""
        return ""

    def write(self, record: RunRecord) -> None:
        """Writes nothing."""


class RunWriter:
    """Writes one run's folder, again and again as the run grows; a context manager.

    Nobody else can write the folder from `claim` until the end.
    """

    def __init__(
        self, path: Path, *, force: bool = False, numbered: bool = False, resume: bool = False
    ) -> None:
        """Looks at the folder and leaves it as it is until `claim` or the first write.

        With `force` an older run's files are replaced by the first write, others kept. With
        `numbered` the folder is always a new one: a number is added to a name that is taken. With
        `resume` the folder is there, and its run goes on.

        Raises:
            ConfigError: The folder is not empty, and neither `force` nor `resume` is on; or it
                cannot be made.
        """
        self.path = path
        self.samples = SampleSink()
        self.items: list[ItemScore] = []
        self.nodes: NodeTable | None = None
        self.timelines: TimelineTable | None = None
        self._written: dict[str, NodeTable | TimelineTable] = {}
        self._flag = "--resume" if resume else "--output-dir"
        self._overwrites = force
        self._reuses = force or resume
        self._numbered = numbered
        self._lock: FolderLock | None = None
        try:
            if not numbered:
                self._refuse_occupied()
            parent = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        except OSError as error:
            raise ConfigError(self._flag, f"{path}: {error.strerror}") from error
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise ConfigError(self._flag, f"{path}: cannot write in {parent}")

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reserve(self) -> None:
        """Claims a folder that is there already, so that no other run can take it meanwhile.

        Raises:
            ConfigError: As for `claim`.
        """
        if not self._numbered and self.path.exists():
            self.claim()

    def claim(self) -> str:
        """Makes the folder this run's own and returns what was added to its name.

        Raises:
            ConfigError: Another process is writing it, another run took it in the meantime, or it
                cannot be made.
        """
        if self._lock is not None:
            return ""
        try:
            added = self._make_numbered() if self._numbered else ""
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FolderLock(self.path, self._flag)
        except OSError as error:
            raise ConfigError(self._flag, f"{self.path}: {error.strerror}") from error
        try:
            self._refuse_occupied()
        except ConfigError:
            lock.release()
            raise
        self._lock = lock
        return added

    def write(self, record: RunRecord) -> None:
        """Rewrites the folder: the tables first, the manifest last.

        Raises:
            RecordError: The record holds NaN or infinity, or the folder cannot be written.
        """
        self.claim()
        tables: dict[str, NodeTable | TimelineTable | None]
        tables = {NODES: self.nodes, TIMELINES: self.timelines}
        manifest = {
            "schema_version": record.schema_version,
            "run_id": record.run_id,
            "status": record.status,
            "files": [
                *(SUMMARY, SAMPLES),
                *([ITEMS] if self.items else []),
                *(name for name, table in tables.items() if table is not None),
            ],
        }
        summary = record.model_dump(mode="json")
        if self._overwrites:
            # From here on the folder says what the new run says, whenever the writer dies.
            self._replace(SUMMARY, lambda part: part.write_text(self._json(SUMMARY, summary)))
            self._overwrites = False
        self._replace(SAMPLES, lambda part: pq.write_table(self.samples.table(), part))
        if self.items:
            self._replace(
                ITEMS,
                lambda part: pq.write_table(items_table(self.items), part, compression="zstd"),
            )
        else:
            self._remove(ITEMS)
        for name, table in tables.items():
            if table is None:
                self._remove(name)
            elif table is not self._written.get(name):
                self._replace(name, table.write)
                self._written[name] = table
        self._replace(SUMMARY, lambda part: part.write_text(self._json(SUMMARY, summary)))
        self._replace(MANIFEST, lambda part: part.write_text(self._json(MANIFEST, manifest)))

    def close(self) -> None:
        """Lets others write the folder."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _make_numbered(self) -> str:
        wanted = self.path
        wanted.parent.mkdir(parents=True, exist_ok=True)
        added, number = "", 1
        while not _made(wanted.with_name(wanted.name + added)):
            number += 1
            added = f"_{number}"
        self.path = wanted.with_name(wanted.name + added)
        return added

    def _refuse_occupied(self) -> None:
        if self._reuses or not self.path.exists():
            return
        # The file of a lock alone is what a run leaves that was killed before it wrote anything.
        if any(found.name != LOCK for found in self.path.iterdir()):
            raise ConfigError(
                self._flag, f"{self.path} is not empty; choose another folder or give --force"
            )

    def _json(self, name: str, value: object) -> str:
        try:
            return json.dumps(value, allow_nan=False, indent=1) + "\n"
        except ValueError as error:
            raise RecordError(self.path / name, f"not written: {error}") from error

    def _remove(self, name: str) -> None:
        """Removes what an older run left."""
        for old in (self.path / name, self.path / (name + _PART)):
            try:
                old.unlink(missing_ok=True)
            except OSError as error:
                problem = f"cannot be removed: {error.strerror or error}"
                raise RecordError(old, problem) from error

    def _replace(self, name: str, write: Callable[[Path], object]) -> None:
        part = self.path / (name + _PART)
        try:
            write(part)
            os.replace(part, self.path / name)
        except OSError as error:
            part.unlink(missing_ok=True)
            problem = f"cannot be written: {error.strerror or error}"
            raise RecordError(self.path / name, problem) from error


def _made(folder: Path) -> bool:
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


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
    if type(version) is not int or version not in READABLE_VERSIONS:
        raise RecordError(
            summary,
            f"has schema version {version!r}, this cgprof reads "
            f"{', '.join(map(str, READABLE_VERSIONS))}; "
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
    frame: pd.DataFrame = read_sample_table(path).to_pandas()
    return frame


def read_sample_table(path: Path) -> pa.Table:
    """Returns the same as a table; columns that an older run does not have are null.

    Raises:
        RecordError: The file is missing or damaged.
    """
    samples = path / SAMPLES
    if not samples.exists():
        raise RecordError(path, f"{SAMPLES} is missing")
    if not samples.is_file():
        raise RecordError(samples, "is damaged: it is no file")
    try:
        table = pq.read_table(samples)
    except (pa.ArrowException, OSError) as error:
        raise RecordError(samples, f"is damaged: {str(error).splitlines()[0]}") from error
    for field in LATER_FIELDS:
        if field.name not in table.schema.names:
            table = table.append_column(field, pa.nulls(table.num_rows, field.type))
    for field in SAMPLE_SCHEMA:
        if table.schema.names.count(field.name) != 1:
            raise RecordError(samples, f"is damaged: it needs one column {field.name}")
    if table.num_columns == len(SAMPLE_SCHEMA):
        table = table.select(SAMPLE_SCHEMA.names)
    if not table.schema.equals(SAMPLE_SCHEMA):
        raise RecordError(samples, "is damaged: its columns have other types")
    return table


def read_items(path: Path) -> tuple[ItemScore, ...]:
    """Returns the items of a run's tasks; none where no task was scored.

    Raises:
        RecordError: The file is damaged.
    """
    items = path / ITEMS
    if not items.exists():
        return ()
    if not items.is_file():
        raise RecordError(items, "is damaged: it is no file")
    try:
        return items_of(pq.read_table(items))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise RecordError(items, f"is damaged: {str(error).splitlines()[0]}") from error


def _load_json(path: Path) -> object:
    try:
        value: object = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(path, f"is damaged: {error}") from error
    return value
