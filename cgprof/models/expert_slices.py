"""Cuts the feed-forward layers of a dense checkpoint into experts that add up to them.

Expert e holds the e-th part of the intermediate columns. With every expert chosen and each of
weight 1, the mixture is the dense layer, up to the order of summation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from cgprof.errors import ConfigError

_WIDTH_MULTIPLE = 8  # Source: grouped matmuls want rows of 16 bytes, and an element has two.
_SEED = 0


def sliced_card(card: dict[str, object], num_experts: int) -> dict[str, object]:
    """Returns a Llama card's counterpart with the experts of `slice_experts`, all of them chosen.

    Raises:
        ConfigError: The intermediate width does not divide into usable slices.
    """
    ffn_size = card["intermediate_size"]
    assert isinstance(ffn_size, int)  # the caller has read the card
    width, rest = divmod(ffn_size, num_experts)
    if rest or width % _WIDTH_MULTIPLE:
        fitting = [
            str(count)
            for count in range(2, ffn_size // _WIDTH_MULTIPLE + 1)
            if ffn_size % (count * _WIDTH_MULTIPLE) == 0
        ]
        raise ConfigError(
            "--slice-experts",
            f"a width of {ffn_size} does not cut into {num_experts} slices of a multiple of "
            f"{_WIDTH_MULTIPLE}; use one of {', '.join(fitting) or 'none'}",
        )
    return {
        **{key: value for key, value in card.items() if key != "architectures"},
        "model_type": "llama_moe",
        "num_experts": num_experts,
        "num_experts_per_tok": num_experts,
        "moe_intermediate_size": width,
        "norm_topk_prob": False,
        "cgprof_uniform_routing": True,
    }


def slice_experts(
    weights: Iterable[tuple[str, torch.Tensor]], num_experts: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields a dense checkpoint's tensors with each feed-forward layer cut into experts.

    The routers are seeded, so that tokens order their experts differently.
    """
    generator = torch.Generator().manual_seed(_SEED)
    for name, tensor in weights:
        layer, found, part = name.partition(".mlp.")
        if not found:
            yield name, tensor
            continue
        columns = part.startswith("down_proj")
        for expert, piece in enumerate(tensor.chunk(num_experts, dim=1 if columns else 0)):
            yield f"{layer}.mlp.experts.{expert}.{part}", piece.contiguous()
        if columns:
            router = torch.randn(num_experts, tensor.shape[0], generator=generator)
            yield f"{layer}.mlp.gate.weight", (router / math.sqrt(tensor.shape[0])).to(tensor.dtype)
