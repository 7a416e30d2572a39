"""Finds the configs that ship with the package: beside it in a wheel, else in the checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Kind = Literal["models", "runs"]

_PACKAGE = Path(__file__).resolve().parents[1]


def bundled_folder(kind: Kind) -> Path:
    """Returns the folder of the bundled models (a card, or a directory) or runs (*.toml)."""
    packaged = _PACKAGE / "configs"
    configs = packaged if packaged.is_dir() else _PACKAGE.parent / "configs"
    return configs / "models" if kind == "models" else configs


def bundled_names(kind: Kind) -> tuple[str, ...]:
    """Returns the names that `find_bundled` knows, sorted."""
    return tuple(_files(kind))


def find_bundled(kind: Kind, name: str) -> Path | None:
    """Returns the bundled file of this name, whatever its case, or None.

    Of a model that is a directory this is its `config.json`.
    """
    wanted = name.casefold()
    return next((path for known, path in _files(kind).items() if known.casefold() == wanted), None)


def _files(kind: Kind) -> dict[str, Path]:
    """Name -> file, sorted; a model's directory goes before a card of the same name."""
    folder = bundled_folder(kind)
    found = {path.stem: path for path in folder.glob("*.json" if kind == "models" else "*.toml")}
    if kind == "models":
        found |= {path.parent.name: path for path in folder.glob("*/config.json")}
    return dict(sorted(found.items()))
