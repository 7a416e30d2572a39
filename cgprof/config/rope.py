"""The rotary embedding of a model card, in one form whatever its spelling.

Spellings: `rope_theta` beside `rope_scaling{type}`, the same with `rope_type`, and
`rope_parameters{rope_type, rope_theta}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from cgprof.config.card_fields import CardFields
from cgprof.config.schema import RopeConfig

Value = TypeVar("Value")

_BLOCKS = ("rope_parameters", "rope_scaling")
_UNSCALED = ("default", "none")


def read_rope(
    fields: CardFields, *, default_theta: float = 10000.0, reason: str = "assumed"
) -> RopeConfig:
    """Returns the rotary embedding of a card, scaled or not; `reason` is that of the default.

    Raises:
        ConfigError: Two spellings disagree, or a block is not understood.
    """
    blocks = {name: _block(fields, name, block) for name, block in rope_blocks(fields).items()}
    kinds = {name: _kind(fields, name, block) for name, block in blocks.items()}
    factors = _numbers(fields, blocks, "factor")
    thetas = _numbers(fields, blocks, "rope_theta")
    stated = fields.find("rope_theta")
    if stated is not None:
        thetas[stated[0]] = fields.positive(*stated)
    kind = _agreed(fields, {f"{name}.rope_type": kind for name, kind in kinds.items()})
    theta = _agreed(fields, thetas)
    if theta is None:
        assumed = f"{reason}: theta {default_theta:g} (no rope_theta)"
        fields.note("rope", ", ".join([assumed, *blocks]))
    else:
        fields.note("rope", ", ".join(dict.fromkeys([*thetas, *blocks])))
    factor = _agreed(fields, factors)
    rope = RopeConfig(
        kind=kind or "default",
        theta=default_theta if theta is None else theta,
        factor=None if kind in (None, "default") else factor,
    )
    return _with_bands(fields, blocks, rope) if kind == "llama3" else rope


def _with_bands(
    fields: CardFields, blocks: Mapping[str, Mapping[str, object]], rope: RopeConfig
) -> RopeConfig:
    """Adds where llama3's scaling of the frequencies begins and ends."""
    stated = {"factor": rope.factor}
    for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
        stated[key] = _agreed(fields, _numbers(fields, blocks, key))
    low, high, length = list(stated.values())[1:]
    if low is None or high is None or length is None or rope.factor is None:
        absent = next(key for key, value in stated.items() if value is None)
        raise fields.error(f"rope scaling 'llama3' has no {absent}")
    if high <= low:
        raise fields.error(f"high_freq_factor {high:g} is not above low_freq_factor {low:g}")
    if not length.is_integer():
        raise fields.error(
            f"original_max_position_embeddings is {length:g}, expected a whole number"
        )
    return rope.model_copy(
        update={
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_positions": int(length),
        }
    )


def _numbers(
    fields: CardFields, blocks: Mapping[str, Mapping[str, object]], key: str
) -> dict[str, float]:
    return {
        f"{name}.{key}": fields.positive(f"{name}.{key}", block[key])
        for name, block in blocks.items()
        if block.get(key) is not None
    }


def rope_blocks(fields: CardFields) -> dict[str, object]:
    """Returns the blocks of a card that speak of its rotary embedding, by their path."""
    found = [fields.find(name) for name in _BLOCKS]
    return {place[0]: place[1] for place in found if place is not None and place[1]}


def _block(fields: CardFields, name: str, block: object) -> Mapping[str, object]:
    if not isinstance(block, dict):
        raise fields.error(f"{name} is {block!r}, expected an object")
    if any(isinstance(value, dict) for value in block.values()):
        raise fields.error(f"{name} differs by layer type, which is not supported")
    return block


def _kind(fields: CardFields, name: str, block: Mapping[str, object]) -> str:
    stated = {
        f"{name}.{key}": block[key] for key in ("rope_type", "type") if block.get(key) is not None
    }
    kind = _agreed(fields, stated)
    if kind is None:
        if block.get("factor") is not None:
            raise fields.error(f"{name} has a factor but no rope_type")
        return "default"
    if not isinstance(kind, str):
        raise fields.error(f"{name}.rope_type is {kind!r}, expected a name")
    return "default" if kind in _UNSCALED else kind


def _agreed(fields: CardFields, stated: Mapping[str, Value]) -> Value | None:
    first = next(iter(stated.items()), None)
    if first is None:
        return None
    for name, value in stated.items():
        if value != first[1]:
            raise fields.error(f"{first[0]} is {first[1]!r} but {name} is {value!r}; keep one")
    return first[1]
