"""Builds a model that can run, and says what its weights weigh without making them."""

from __future__ import annotations

import torch

from cgprof.config.schema import ModelConfig
from cgprof.models.checkpoint import load_directory, seed_weights
from cgprof.models.decoder import Decoder
from cgprof.moe.dispatcher import LocalDispatcher, TokenDispatcher


def build_model(
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    dispatcher: TokenDispatcher,
    batch_invariant: bool,
    seed: int,
    experts: range | None = None,
) -> Decoder:
    """Returns the model on the device, with the weights of its directory, else seeded ones.

    Of the experts it holds those in `experts`, None for all; their weights are the same then.

    Raises:
        UnsupportedError: The card or the combination cannot be run.
        ConfigError: The directory's weights are damaged or do not fit the card.
    """
    model = Decoder(
        config,
        device=device,
        dtype=dtype,
        dispatcher=dispatcher,
        batch_invariant=batch_invariant,
        experts=experts,
    )
    if config.weights is not None and config.directory is not None:
        load_directory(model, config.directory)
    else:
        seed_weights(model, seed)
    return model


def weight_bytes(config: ModelConfig, dtype: torch.dtype, experts: range | None = None) -> int:
    """Returns the bytes of the weights with these experts from shapes alone; allocates none."""
    one, two = (
        Decoder(
            config.model_copy(update={"num_layers": num_layers}),
            device=torch.device("meta"),
            dtype=dtype,
            dispatcher=LocalDispatcher(loopback=False),
            batch_invariant=False,
            experts=experts,
        ).num_weight_bytes
        for num_layers in (1, 2)
    )
    return one + (config.num_layers - 1) * (two - one)
