"""TOML, flags and `--set` -> RunConfig and ModelConfig, and the fingerprint of the two.

Later wins: defaults, the file, flags, `--set`. An error names the file, the setting and its flag.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from cgprof.config.bundled import bundled_names, find_bundled
from cgprof.config.model_card import load_model_card
from cgprof.config.schema import ModelConfig, RunConfig
from cgprof.config.settings import Settings, parse_assignment, read_toml
from cgprof.errors import ConfigError

_DEFAULT_RUN = "tiny"


def load_run(
    config: str | Path | None = None,
    model: str | None = None,
    overrides: Mapping[str, object] | None = None,
    assignments: Sequence[str] = (),
) -> tuple[RunConfig, ModelConfig]:
    """Returns what a run is asked to do and the model it runs, with sizes and dtype resolved.

    With neither `config` nor `model` the bundled tiny run is meant. `overrides` are flags by dotted
    path; `assignments` are `part.field=value` in TOML syntax, where a bare word is a string.

    Raises:
        ConfigError: A setting is unknown or wrong, or a file cannot be read.
    """
    settings = Settings()
    if config is None and model is None:
        config = _DEFAULT_RUN
    if config is not None:
        path = _config_path(str(config))
        settings.add(read_toml(path), origin=f"{path}: ")
    flags = dict(overrides or {})
    if model is not None:
        flags["model.name"] = model
    settings.add(flags)
    for text in assignments:
        name, value = parse_assignment(text)
        settings.add({name: value}, origin="--set ")
    return _resolve(settings)


def fingerprint(run: RunConfig, model: ModelConfig) -> str:
    """Returns the SHA-256 of what the two mean, whatever the spelling or the name of the card."""
    meaning = {
        "run": run.model_dump(mode="json", exclude={"model": {"name", "dtype", "load_format"}}),
        "model": model.model_dump(mode="json", exclude={"name", "directory", "sources"}),
    }
    text = json.dumps(meaning, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _resolve(settings: Settings) -> tuple[RunConfig, ModelConfig]:
    run = settings.validate()
    model = load_model_card(
        run.model.name,
        where=settings.spell("model.name"),
        with_weights=run.model.load_format == "auto",
    )
    if run.model.dtype != "auto":
        sources = {**model.sources, "dtype": "model.dtype of the run"}
        model = model.model_copy(update={"dtype": run.model.dtype, "sources": sources})
    length = run.limits.max_model_len
    if length > model.max_positions:
        if "limits.max_model_len" in settings:
            raise settings.error(
                "limits.max_model_len",
                f"{length} is above the {model.max_positions} positions of {model.name}",
            )
        limits = run.limits.model_copy(update={"max_model_len": model.max_positions})
        run = run.model_copy(update={"limits": limits})
    return run, model


def _config_path(name: str) -> Path:
    bundled = find_bundled("runs", name)
    if bundled is not None:
        return bundled
    path = Path(name)
    if not name:
        raise ConfigError("--config", f"is empty; bundled: {', '.join(bundled_names('runs'))}")
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "no such file"
        known = ", ".join(bundled_names("runs"))
        raise ConfigError(f"{name} (--config)", f"{what}; bundled: {known}")
    return path
