"""Fills a model's weights: seeded by tensor name on the device, or copied from named tensors.

A tensor's values depend on the seed, its name and its shape alone, so that every layout agrees.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch

from cgprof.errors import ConfigError
from cgprof.models.decoder import Decoder

_NORM_SPREAD = 0.1  # around 1, so that a norm applied to the wrong tensor shows
_ROUTER_GAIN = 2.0  # spreads the router's scores; with 1 the chosen experts weigh nearly the same
_NAMES_SHOWN = 3


def seed_weights(model: Decoder, seed: int) -> None:
    """Fills every weight with normal values that keep activations near one."""
    generators: dict[torch.device, torch.Generator] = {}
    for name, tensor in model.named_weights():
        generator = generators.get(tensor.device)
        if generator is None:
            generator = generators[tensor.device] = torch.Generator(tensor.device)
        generator.manual_seed(tensor_seed(seed, name))
        mean, std = _distribution(name, tensor, tied=model.config.tied_embeddings)
        tensor.normal_(mean, std, generator=generator)


def tensor_seed(seed: int, name: str) -> int:
    """Returns the generator seed of one tensor, equal on every rank and machine."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def load_state(model: Decoder, state: Mapping[str, torch.Tensor]) -> None:
    """Copies tensors under their Hugging Face names into the model, converting the dtype.

    Raises:
        ConfigError: A name is missing, unknown, or has another shape; nothing is copied then.
    """
    targets = dict(model.named_weights())
    surplus = set(state) - set(targets)
    if model.config.tied_embeddings:
        surplus.discard("lm_head.weight")
    for problem, names in (("lacks", set(targets) - set(state)), ("has unknown", surplus)):
        if names:
            raise ConfigError("checkpoint", f"it {problem} {_listed(sorted(names))}")
    wrong = [name for name, target in targets.items() if state[name].shape != target.shape]
    if wrong:
        name = wrong[0]
        raise ConfigError(
            "checkpoint",
            f"{name} has shape {tuple(state[name].shape)}, the model card needs "
            f"{tuple(targets[name].shape)} ({len(wrong)} tensors disagree)",
        )
    for name, target in targets.items():
        target.copy_(state[name])


def _distribution(name: str, tensor: torch.Tensor, *, tied: bool) -> tuple[float, float]:
    if name.endswith("norm.weight"):
        return 1.0, _NORM_SPREAD
    if name == "model.embed_tokens.weight" and not tied:
        return 0.0, 1.0
    gain = _ROUTER_GAIN if name.endswith("mlp.gate.weight") else 1.0
    return 0.0, gain / math.sqrt(tensor.shape[-1])


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    return shown if more <= 0 else f"{shown} and {more} more tensors"
