"""Fits a model's weights to sequences whose targets are given; seeded, and nothing is stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch.nn import functional as F

from cgprof.config.schema import ModelConfig
from cgprof.models.differentiable import DifferentiableDecoder, initial_weights

IGNORED = -100  # the target of a token that is not learnt

_WARMUP_STEPS = 100
_LAST_RATE = 0.02  # of the learning rate, at the end of the cosine
_BETAS = (0.9, 0.98)
_WEIGHT_DECAY = 0.01  # of matrices
_BALANCE = 0.01  # weight of the experts' imbalance in the loss
_MOST_GRADIENT_NORM = 1.0
_REPORT_EVERY = 100

Batch = tuple[torch.Tensor, torch.Tensor]  # tokens and targets, both [B, N] i64


def fit(
    config: ModelConfig,
    batches: Iterable[Batch],
    *,
    steps: int,
    learning_rate: float,
    seed: int,
    device: torch.device,
    progress: Callable[[str], None],
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Returns the weights by name, on the CPU, after one step a batch, and the last losses.

    The losses are means over the last steps: `answers`, the cross entropy of targets, and
    `imbalance`, which is 1 when the experts share the tokens evenly.
    """
    weights = initial_weights(config, seed, device)
    decoder = DifferentiableDecoder(config, device)
    matrices = [tensor for tensor in weights.values() if tensor.ndim > 1]
    vectors = [tensor for tensor in weights.values() if tensor.ndim == 1]
    optimiser = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": _WEIGHT_DECAY},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=learning_rate,
        betas=_BETAS,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate(step, steps))
    recent: list[torch.Tensor] = []
    losses: dict[str, float] = {}
    for step, (tokens, targets) in enumerate(batches, start=1):
        scores, imbalance = decoder.forward(weights, tokens.to(device))
        answers = F.cross_entropy(
            scores.flatten(0, 1), targets.flatten().to(device), ignore_index=IGNORED
        )
        torch.autograd.backward(answers + _BALANCE * imbalance)
        torch.nn.utils.clip_grad_norm_(weights.values(), _MOST_GRADIENT_NORM)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
        recent.append(torch.stack((answers.detach(), imbalance.detach())))
        if step % _REPORT_EVERY == 0 or step == steps:
            means = torch.stack(recent).mean(dim=0).tolist()
            losses = dict(zip(("answers", "imbalance"), means, strict=True))
            recent.clear()
            progress(f"step {step}/{steps} " + " ".join(f"{k} {v:.4f}" for k, v in losses.items()))
    return {name: tensor.detach().cpu() for name, tensor in weights.items()}, losses


def _rate(step: int, steps: int) -> float:
    """The share of the learning rate at a step: a linear rise, then a cosine down."""
    rise = min(1.0, (step + 1) / _WARMUP_STEPS)
    return rise * (_LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * step / steps)) / 2)
