"""Finds the configs that ship with the package: beside it in a wheel, else in the checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Kind = Literal["models", "runs"]

_PACKAGE = Path(__file__).resolve().parents[1]


def bundled_folder(kind: Kind) -> Path:
    """Returns the folder of the bundled model cards (*.json) or runs (*.toml)."""
    packaged = _PACKAGE / "configs"
    configs = packaged if packaged.is_dir() else _PACKAGE.parent / "configs"
    return configs / "models" if kind == "models" else configs


def bundled_names(kind: Kind) -> tuple[str, ...]:
    """Returns the names that `find_bundled` knows, sorted."""
    return tuple(sorted(path.stem for path in _files(kind)))


def find_bundled(kind: Kind, name: str) -> Path | None:
    """Returns the bundled file of this name, whatever its case, or None."""
    wanted = name.casefold()
    return next((path for path in _files(kind) if path.stem.casefold() == wanted), None)


def _files(kind: Kind) -> list[Path]:
    return sorted(bundled_folder(kind).glob("*.json" if kind == "models" else "*.toml"))
