"""The quantisation block of a model card: where it lies, what it stores a weight as, what it skips.

Source: the quantisation configs of transformers 5 and of published checkpoints.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from cgprof.config.card_fields import CardFields

_KEYS = ("quantization_config", "compression_config")
_IGNORED = ("modules_to_not_convert", "ignored_layers", "ignore", "llm_int8_skip_modules")
_WHOLE = 0  # of a block's side: as long as the matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """How the matrices that it covers are stored: elements, and a scale for each block of them."""

    method: str
    source: str
    bits: int  # of an element
    block: tuple[int, int]  # rows and columns that share a scale
    scale_bits: int  # with the zero point, where there is one
    experts_only: bool = False
    ignored: tuple[str, ...] = ()

    def matrix_bytes(self, num_out: int, num_in: int) -> int:
        """Returns the bytes of a matrix [num_out, num_in] and its scales."""
        rows, columns = self.block
        scales = -(-num_out // (rows or num_out)) * -(-num_in // (columns or num_in))
        return -(-(num_out * num_in * self.bits + scales * self.scale_bits) // 8)

    def ignores(self) -> Callable[[str], bool]:
        """Returns whether a module of that dotted name is left as it was.

        An entry is a name's beginning or end at a dot, a pattern with `*`, or `re:` and a regular
        expression.
        """
        patterns = [
            entry.removeprefix("re:")
            if entry.startswith("re:")
            else rf"(?:.*\.)?{fnmatch.translate(entry).removesuffix(chr(92) + 'Z')}(?:\..*)?\Z"
            for entry in self.ignored
        ]
        if not patterns:
            return lambda name: False
        found = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
        return lambda name: found.match(name) is not None


def find_quantisation(fields: CardFields) -> tuple[str, object] | None:
    """Returns path and value of the quantisation block, wherever in the card it lies, or None."""
    for prefix, scope in _places(fields):
        for key in _KEYS:
            if scope.get(key) is not None:
                return prefix + key, scope[key]
    return None


def read_quantisation(fields: CardFields) -> Quantisation | None:
    """Returns how a card's weights are quantised, or None.

    Raises:
        ConfigError: The block names no method, an unknown one, or lacks what the method needs.
    """
    found = find_quantisation(fields)
    if found is None:
        return None
    path, block = found
    method = block.get("quant_method") if isinstance(block, dict) else None
    known = ", ".join(_METHODS)
    if not isinstance(block, dict) or method is None:
        raise fields.error(f"{path} names no quant_method; known: {known}")
    reader = _METHODS.get(str(method))
    if reader is None:
        raise fields.error(f"{path}.quant_method is {method!r}, which is not known; known: {known}")
    bits, shape, scale_bits = reader(fields, path, block)
    return Quantisation(
        method=str(method),
        source=path,
        bits=bits,
        block=shape,
        scale_bits=scale_bits,
        experts_only=method == "mxfp4",
        ignored=tuple(_ignored(fields, path, block)),
    )


def _places(fields: CardFields) -> Iterator[tuple[str, Mapping[str, object]]]:
    yield from fields.scopes
    top = fields.scopes[-1][1]
    for key, value in top.items():
        if isinstance(value, dict) and f"{key}." not in dict(fields.scopes):
            yield f"{key}.", value


def _ignored(fields: CardFields, path: str, block: Mapping[str, object]) -> Iterator[str]:
    for key in _IGNORED:
        names = block.get(key) or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise fields.error(f"{path}.{key} is {names!r}, expected a list of names")
        for name in names:
            try:
                re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
            except re.error as error:
                raise fields.error(f"{path}.{key}: {name!r} is no pattern: {error}") from error
            yield name


_Storage = tuple[int, tuple[int, int], int]  # bits, block, scale bits


def _fp8(fields: CardFields, path: str, block: Mapping[str, object]) -> _Storage:
    return 8, _block_shape(fields, f"{path}.weight_block_size", block.get("weight_block_size")), 32


def _mxfp4(fields: CardFields, path: str, block: Mapping[str, object]) -> _Storage:
    return 4, (1, 32), 8


def _grouped(fields: CardFields, path: str, block: Mapping[str, object]) -> _Storage:
    bits = fields.whole(f"{path}.bits", block.get("bits"))
    group = fields.whole(f"{path}.group_size", block.get("group_size"), minimum=-1)
    return bits, (1, max(group, _WHOLE)), 16 + bits


def _bitsandbytes(fields: CardFields, path: str, block: Mapping[str, object]) -> _Storage:
    return (4, (1, 64), 32) if block.get("load_in_4bit") else (8, (1, _WHOLE), 32)


def _compressed(fields: CardFields, path: str, block: Mapping[str, object]) -> _Storage:
    groups = block.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = first.get("weights") if isinstance(first, dict) else None
    if not isinstance(weights, dict):
        raise fields.error(f"{path}.config_groups says nothing of weights")
    bits = fields.whole(f"{path}.config_groups.*.weights.num_bits", weights.get("num_bits"))
    match weights.get("strategy"):
        case "group":
            where = f"{path}.config_groups.*.weights.group_size"
            return bits, (1, fields.whole(where, weights.get("group_size"))), 16
        case "block":
            where = f"{path}.config_groups.*.weights.block_structure"
            return bits, _block_shape(fields, where, weights.get("block_structure")), 16
        case "channel":
            return bits, (1, _WHOLE), 16
        case _:
            return bits, (_WHOLE, _WHOLE), 16


def _block_shape(fields: CardFields, path: str, value: object) -> tuple[int, int]:
    if value is None:
        return _WHOLE, _WHOLE
    if not isinstance(value, list) or len(value) != 2:
        raise fields.error(f"{path} is {value!r}, expected rows and columns")
    return fields.whole(path, value[0]), fields.whole(path, value[1])


_METHODS: dict[str, Callable[[CardFields, str, Mapping[str, object]], _Storage]] = {
    "awq": _grouped,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "gptq": _grouped,
    "mxfp4": _mxfp4,
}
