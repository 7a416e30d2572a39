"""Builds a model that can run, and says what its weights weigh without making them."""

from __future__ import annotations

import torch

from cgprof.config.schema import ModelConfig
from cgprof.models.checkpoint import seed_weights
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
) -> Decoder:
    """Returns the model with seeded weights on the device.

    Raises:
        UnsupportedError: The card or the combination cannot be run.
    """
    model = Decoder(
        config,
        device=device,
        dtype=dtype,
        dispatcher=dispatcher,
        batch_invariant=batch_invariant,
    )
    seed_weights(model, seed)
    return model


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Returns the bytes of the model's weights from shapes alone; allocates none."""
    model = Decoder(
        config,
        device=torch.device("meta"),
        dtype=dtype,
        dispatcher=LocalDispatcher(loopback=False),
        batch_invariant=False,
    )
    return model.num_weight_bytes
