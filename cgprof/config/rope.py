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
_ASSUMED_THETA = 10000.0  # Source: the published default of the Qwen3 families


def read_rope(fields: CardFields) -> RopeConfig:
    """Returns the rotary embedding of a card, scaled or not.

    Raises:
        ConfigError: Two spellings disagree, or a block is not understood.
    """
    blocks = {name: _block(fields, name) for name in _BLOCKS if fields.card.get(name)}
    kinds = {name: _kind(fields, name, block) for name, block in blocks.items()}
    factors = {
        f"{name}.factor": fields.positive(f"{name}.factor", block["factor"])
        for name, block in blocks.items()
        if block.get("factor") is not None
    }
    thetas = {
        f"{name}.rope_theta": fields.positive(f"{name}.rope_theta", block["rope_theta"])
        for name, block in blocks.items()
        if block.get("rope_theta") is not None
    }
    if fields.card.get("rope_theta") is not None:
        thetas["rope_theta"] = fields.positive("rope_theta", fields.card["rope_theta"])
    kind = _agreed(fields, {f"{name}.rope_type": kind for name, kind in kinds.items()})
    theta = _agreed(fields, thetas)
    if theta is None:
        fields.note("rope", f"assumed: theta {_ASSUMED_THETA:g} (no rope_theta)")
    else:
        fields.note("rope", ", ".join(dict.fromkeys([*thetas, *blocks])))
    factor = _agreed(fields, factors)
    return RopeConfig(
        kind=kind or "default",
        theta=_ASSUMED_THETA if theta is None else theta,
        factor=None if kind in (None, "default") else factor,
    )


def _block(fields: CardFields, name: str) -> Mapping[str, object]:
    block = fields.card[name]
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
