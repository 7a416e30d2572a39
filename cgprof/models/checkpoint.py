"""Fills a model's weights: seeded by tensor name on the device, or copied from a checkpoint.

A seeded tensor's values depend on the seed, its name and its shape alone: every layout agrees.
A checkpoint is always that of the whole model; a rank copies its own experts' part of it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from cgprof.config.weight_files import find_weights, listed
from cgprof.errors import ConfigError
from cgprof.models.decoder import Decoder
from cgprof.moe.dispatcher import LocalDispatcher

_NORM_SPREAD = 0.1  # around 1, so that a norm applied to the wrong tensor shows
_ROUTER_GAIN = 2.0  # spreads the router's scores; with 1 the chosen experts weigh nearly the same
_CONVERTED = ("F64", "F32", "F16", "BF16")
_RECOMPUTED = ".rotary_emb.inv_freq"  # old checkpoints store what follows from the card


def seed_weights(model: Decoder, seed: int) -> None:
    """Fills every weight with normal values that keep activations near one."""
    for name, tensor in model.named_weights():
        _fill(name, tensor, seed, tied=model.config.tied_embeddings)


def reread_weights(model: Decoder, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields every weight afresh from where the model's came from, in its dtype, one at a time.

    Raises:
        ConfigError: The checkpoint is gone or damaged.
    """
    config = model.config
    if config.weights is None or config.directory is None:
        for name, tensor in model.named_weights():
            fresh = torch.empty_like(tensor)
            _fill(name, fresh, seed, tied=config.tied_embeddings)
            yield name, fresh
        return
    found = find_weights(Path(config.directory))
    if found is None:
        raise ConfigError(config.directory, "its weights are no longer there")
    targets = dict(model.named_weights())
    by_file: dict[Path, list[str]] = {}
    for name in targets:
        by_file.setdefault(found.tensors[name].file, []).append(name)
    for file, names in by_file.items():
        with safe_open(file, framework="pt", device=str(targets[names[0]].device)) as stored:
            for name in names:
                yield name, stored.get_tensor(name).to(targets[name].dtype)


def tensor_seed(seed: int, name: str) -> int:
    """Returns the generator seed of one tensor, equal on every rank and machine."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def load_state(model: Decoder, state: Mapping[str, torch.Tensor]) -> None:
    """Copies tensors under their Hugging Face names into the model, converting the dtype.

    Raises:
        ConfigError: A name is missing, unknown, or has another shape; nothing is copied then.
    """
    _check_names_and_shapes(
        model, {name: tuple(tensor.shape) for name, tensor in state.items()}, "checkpoint"
    )
    for name, target in model.named_weights():
        target.copy_(state[name])


def load_directory(model: Decoder, directory: str) -> None:
    """Copies the safetensors of a model's directory into the model, one tensor at a time.

    Each goes straight to the model's device and is converted to its dtype there.

    Raises:
        ConfigError: There are none, they are damaged or of a dtype that is not converted, or a
            name is missing, unknown, or has another shape; nothing is copied then.
    """
    weights = find_weights(Path(directory))
    if weights is None:
        raise ConfigError(
            directory, "has no safetensors; take seeded weights with --load-format dummy"
        )
    where = str(Path(directory) / weights.source)
    tensors = weights.tensors
    _check_names_and_shapes(model, {name: stored.shape for name, stored in tensors.items()}, where)
    targets = dict(model.named_weights())
    for name in targets:
        if tensors[name].dtype not in _CONVERTED:
            raise ConfigError(
                where, f"{name} is {tensors[name].dtype}, only {', '.join(_CONVERTED)} are loaded"
            )
    by_file: dict[Path, list[str]] = {}
    for name in targets:
        by_file.setdefault(tensors[name].file, []).append(name)
    for file, names in by_file.items():
        try:
            with safe_open(file, framework="pt", device=str(targets[names[0]].device)) as stored:
                for name in names:
                    targets[name].copy_(stored.get_tensor(name))
        except SafetensorError as error:
            raise ConfigError(str(file), f"is damaged: {error}") from error


def _check_names_and_shapes(
    model: Decoder, shapes: Mapping[str, tuple[int, ...]], where: str
) -> None:
    targets = _whole_shapes(model)
    surplus = {name for name in shapes.keys() - targets.keys() if not name.endswith(_RECOMPUTED)}
    if model.config.tied_embeddings:
        surplus.discard("lm_head.weight")
    for problem, names in (("lacks", targets.keys() - shapes.keys()), ("has unknown", surplus)):
        if names:
            count = f"{len(names)} tensor{'s' if len(names) > 1 else ''}"
            raise ConfigError(
                where, f"{problem} {listed(sorted(names))} ({count}); does the card fit it?"
            )
    wrong = [name for name, shape in targets.items() if shapes[name] != shape]
    if wrong:
        name = wrong[0]
        raise ConfigError(
            where,
            f"{name} has shape {shapes[name]}, the model card needs {targets[name]} "
            f"({len(wrong)} disagree)",
        )


def _whole_shapes(model: Decoder) -> dict[str, tuple[int, ...]]:
    """The shapes of all weights, other ranks' included: all ranks refuse the same checkpoints."""
    if len(model.experts) < model.config.num_experts:
        model = Decoder(
            model.config,
            device=torch.device("meta"),
            dtype=torch.float32,
            dispatcher=LocalDispatcher(loopback=False),
            batch_invariant=False,
        )
    return {name: tuple(tensor.shape) for name, tensor in model.named_weights()}


def _fill(name: str, tensor: torch.Tensor, seed: int, *, tied: bool) -> None:
    generator = torch.Generator(tensor.device).manual_seed(tensor_seed(seed, name))
    mean, std = _distribution(name, tensor, tied=tied)
    tensor.normal_(mean, std, generator=generator)


def _distribution(name: str, tensor: torch.Tensor, *, tied: bool) -> tuple[float, float]:
    if name.endswith("norm.weight"):
        return 1.0, _NORM_SPREAD
    if name == "model.embed_tokens.weight" and not tied:
        return 0.0, 1.0
    gain = _ROUTER_GAIN if name.endswith(".gate.weight") else 1.0
    return 0.0, gain / math.sqrt(tensor.shape[-1])
