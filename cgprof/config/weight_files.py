"""What a model's directory holds in safetensors files, read from their headers alone.

Source: the safetensors format: eight bytes of header length, a JSON header, then the data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cgprof.errors import ConfigError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_OTHER_FORMATS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
_HEADER_LIMIT_BYTES = 100_000_000  # Source: the bound of the safetensors library
_PIECES = 64  # of each file's data that its identity covers
_PIECE_BYTES = 4096
_NAMES_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies, and its dtype as safetensors spell it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """A checkpoint by the names of its tensors.

    `identity` is a SHA-256 of all headers and of evenly spaced pieces of the data: it tells two
    checkpoints apart without reading either of them whole.
    """

    source: str
    tensors: dict[str, StoredTensor]
    identity: str


def find_weights(directory: Path) -> WeightFiles | None:
    """Returns the checkpoint of a model's directory, or None if it has no weights at all.

    `model.safetensors` goes before an index of several files.

    Raises:
        ConfigError: The weights are damaged, incomplete, or in another format.
    """
    if (directory / SINGLE_FILE).is_file():
        return _read([directory / SINGLE_FILE], SINGLE_FILE, None)
    if (directory / INDEX_FILE).is_file():
        weight_map = _read_index(directory / INDEX_FILE)
        files = [directory / name for name in sorted(set(weight_map.values()))]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise ConfigError(
                str(directory / INDEX_FILE), f"names files that are not there: {listed(absent)}"
            )
        return _read(files, INDEX_FILE, weight_map)
    others = sorted(p.name for p in directory.iterdir() if p.suffix in _OTHER_FORMATS)
    if others:
        raise ConfigError(
            str(directory),
            f"has {listed(others)}, but neither {SINGLE_FILE} nor {INDEX_FILE}; convert the "
            "weights, or take seeded ones with --load-format dummy",
        )
    return None


def stored_names(directory: Path) -> tuple[str, Collection[str]] | None:
    """Returns where the names of a directory's tensors stand and the names, None without weights.

    An index of files that are not there still counts: it says what they hold.

    Raises:
        ConfigError: The weights or their index are damaged.
    """
    if (directory / SINGLE_FILE).is_file():
        found = _read([directory / SINGLE_FILE], SINGLE_FILE, None)
        return found.source, found.tensors.keys()
    if (directory / INDEX_FILE).is_file():
        return INDEX_FILE, _read_index(directory / INDEX_FILE).keys()
    return None


def listed(names: Sequence[str]) -> str:
    """Returns the first few names and how many more there are."""
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    return shown if more <= 0 else f"{shown} and {more} more"


def _read(files: Sequence[Path], source: str, weight_map: dict[str, str] | None) -> WeightFiles:
    digest = hashlib.sha256()
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, stored in _read_file(file, digest):
            if weight_map is not None and weight_map.get(name) != file.name:
                continue
            tensors[name] = stored
    lost = sorted(set(weight_map or {}) - set(tensors))
    if lost:
        where = str(files[0].parent / source)
        raise ConfigError(where, f"its files do not hold {listed(lost)}")
    return WeightFiles(source=source, tensors=tensors, identity=f"sha256:{digest.hexdigest()}")


def _read_file(file: Path, digest: hashlib._Hash) -> Iterator[tuple[str, StoredTensor]]:
    try:
        with file.open("rb") as stream:
            size = file.stat().st_size
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(size - 8, _HEADER_LIMIT_BYTES):
                raise ConfigError(str(file), "is not a safetensors file, or is cut off")
            header = stream.read(length)
            digest.update(header)
            start = 8 + length
            for piece in range(_PIECES):
                stream.seek(start + (size - start) * piece // _PIECES)
                digest.update(stream.read(_PIECE_BYTES))
    except OSError as error:
        raise ConfigError(str(file), f"cannot be read: {error.strerror}") from error
    yield from _read_header(file, header, size - start)


def _read_header(file: Path, header: bytes, data_bytes: int) -> Iterator[tuple[str, StoredTensor]]:
    try:
        entries = dict(json.loads(header))
        entries.pop("__metadata__", None)
        end = max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
        tensors = {
            str(name): StoredTensor(
                file=file, dtype=str(entry["dtype"]), shape=tuple(map(int, entry["shape"]))
            )
            for name, entry in entries.items()
        }
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise ConfigError(str(file), "its safetensors header is damaged") from error
    if end != data_bytes:
        raise ConfigError(
            str(file), f"holds {data_bytes} bytes of data, its header says {end}; fetch it again"
        )
    yield from tensors.items()


def _read_index(file: Path) -> dict[str, str]:
    try:
        weight_map = dict(json.loads(file.read_text(encoding="utf-8"))["weight_map"])
    except OSError as error:
        raise ConfigError(str(file), f"cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(str(file), "is not an index of safetensors files") from error
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ConfigError(str(file), f"{name!r} is not the name of a file beside it")
    if not weight_map:
        raise ConfigError(str(file), "names no tensor")
    return weight_map
