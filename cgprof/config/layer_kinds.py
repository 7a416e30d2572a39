"""Which layers of a model keep keys and values, which of them in a window, and which hold experts.

Source: the keys of published cards, each with the rule of the family that brought it.
"""

from __future__ import annotations

from typing import NamedTuple

from cgprof.config.card_fields import CardFields

_MOST_LAYERS = 10_000


class AttentionLayers(NamedTuple):
    """Layers that attend, those of them that do so in a window, and the kinds of all others."""

    attending: tuple[int, ...]
    num_windowed: int
    others: tuple[str, ...]


def read_attention_layers(fields: CardFields, num_layers: int) -> AttentionLayers:
    """Returns the layers that a card's `layer_types` tells apart; without it all attend alike.

    Raises:
        ConfigError: `layer_types` is no list of a name for each layer, or the layers are too many.
    """
    if num_layers > _MOST_LAYERS:
        raise fields.error(f"{num_layers} layers are more than the {_MOST_LAYERS} that are sized")
    found = fields.find("layer_types")
    if found is None:
        windowed = fields.get("sliding_window") and fields.get("use_sliding_window") is not False
        return AttentionLayers(tuple(range(num_layers)), num_layers if windowed else 0, ())
    path, kinds = found
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.error(f"{path} is not a list of {num_layers} names, one for each layer")
    attends = ["attention" in str(kind) and "linear" not in str(kind) for kind in kinds]
    others = {str(kind) for kind, attend in zip(kinds, attends, strict=True) if not attend}
    return AttentionLayers(
        attending=tuple(layer for layer, attend in enumerate(attends) if attend),
        num_windowed=sum(str(kind).startswith(("sliding", "chunked")) for kind in kinds),
        others=tuple(sorted(others)),
    )


def read_moe_layers(fields: CardFields, num_layers: int) -> tuple[int, ...]:
    """Returns the layers of a mixture of experts whose feed-forward part is experts.

    Raises:
        ConfigError: A key that places them is not understood.
    """
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise fields.error(f"mlp_only_layers is {dense!r}, expected a list")
    first = _whole(fields, "first_k_dense_replace", default=0)
    step = _whole(fields, "decoder_sparse_step", "interleave_moe_layer_step", default=1)
    every = fields.get("moe_layer_freq")
    if isinstance(every, list):
        if len(every) != num_layers:
            raise fields.error(f"moe_layer_freq has {len(every)} entries for {num_layers} layers")
        sparse = [bool(flag) for flag in every]
    else:
        period = _whole(fields, "moe_layer_freq", default=1)
        sparse = [layer % period == 0 for layer in range(num_layers)]
    return tuple(
        layer
        for layer in range(num_layers)
        if sparse[layer] and layer >= first and (layer + 1) % step == 0 and layer not in dense
    )


def _whole(fields: CardFields, *names: str, default: int) -> int:
    found = fields.find(*names)
    return default if found is None else fields.whole(*found, minimum=min(default, 1))
