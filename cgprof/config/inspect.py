"""What a model card says, and the bytes that follow, whether or not its family can be run.

A run takes only what `model_card` accepts. This looks at any card that has attention dimensions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

from cgprof.config.card_fields import NAMES
from cgprof.config.card_reading import CardField, CardReader
from cgprof.config.dimensions import DTYPE_BYTES
from cgprof.config.families import find_family
from cgprof.config.layer_kinds import AttentionLayers, read_attention_layers
from cgprof.config.model_card import card_title, find_card, load_model_card, read_card
from cgprof.config.quantisation import Quantisation, read_quantisation
from cgprof.config.schema import DtypeName, Family
from cgprof.config.weight_files import stored_names
from cgprof.config.weight_sizes import WeightPart, WeightShape, weight_parts
from cgprof.errors import ConfigError

_WHERE = "MODEL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """A card, normalised and sized. `refusal` is what every other command says of it, if any."""

    name: str
    path: str
    family: Family | None
    refusal: str | None
    fields: tuple[CardField, ...]
    attention: str  # MHA, GQA, MQA or MLA
    num_experts: int
    kv_bytes_per_token: int
    dtype: DtypeName
    weights: tuple[WeightPart, ...]
    quantisation: Quantisation | None
    notes: tuple[str, ...]

    @property
    def is_moe(self) -> bool:
        """Whether some feed-forward layers are made of experts."""
        return self.num_experts > 0

    @property
    def weight_bytes(self) -> int | None:
        """Bytes of all parts, None if one of them is not known."""
        known = [part.num_bytes for part in self.weights if part.num_bytes is not None]
        return sum(known) if len(known) == len(self.weights) else None

    @property
    def num_parameters(self) -> int | None:
        """Weights of all parts, None if one of them is not known."""
        known = [part.num_parameters for part in self.weights if part.num_parameters is not None]
        return sum(known) if len(known) == len(self.weights) else None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what the card's fields mean, whatever its spelling and name."""
        meaning = {
            "fields": {field.name: field.value for field in self.fields},
            "weights": self.weights,
            "kv_bytes_per_token": self.kv_bytes_per_token,
        }
        text = json.dumps(meaning, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def inspect_card(name: str, *, dtype: DtypeName | None = None) -> Inspection:
    """Returns what a bundled name, a JSON file, or a folder with a `config.json` holds.

    `dtype` takes the place of the card's.

    Raises:
        ConfigError: There is no such card, it has no attention dimensions, or it contradicts
            itself or the weights beside it.
    """
    path = find_card(name, _WHERE)
    card = read_card(path)
    quantisation = read_quantisation(card)
    family, _ = find_family(card)
    stored = stored_names(path.parent) if path.name == "config.json" else None
    reader = CardReader(card, family)
    num_heads, num_layers = reader.optional("num_heads"), reader.optional("num_layers")
    if num_heads is None or num_layers is None:
        field = "num_heads" if num_heads is None else "num_layers"
        raise card.error(
            f"has no attention dimensions: no {field} (looked for {', '.join(NAMES[field])}), so "
            "it is not the card of a language model"
        )
    layers = read_attention_layers(card, num_layers)
    shape = reader.shape(num_heads, num_layers, layers.attending, stored)
    chosen = reader.rest(dtype, quantisation)
    element_bytes = DTYPE_BYTES[chosen]
    return Inspection(
        name=card_title(path),
        path=str(path),
        family=family,
        refusal=_refusal(name),
        fields=tuple(reader.fields),
        attention=_attention(shape),
        num_experts=0 if shape.experts is None else shape.experts.num_experts,
        kv_bytes_per_token=len(layers.attending) * _kv_elements(shape) * element_bytes,
        dtype=chosen,
        weights=weight_parts(shape, element_bytes, quantisation),
        quantisation=quantisation,
        notes=tuple(_notes(reader, family, layers)),
    )


def _refusal(name: str) -> str | None:
    try:
        load_model_card(name)
    except ConfigError as error:
        return error.problem
    return None


def _attention(shape: WeightShape) -> str:
    if shape.latent is not None:
        return "MLA"
    if shape.num_kv_heads == shape.num_heads:
        return "MHA"
    return "MQA" if shape.num_kv_heads == 1 else "GQA"


def _kv_elements(shape: WeightShape) -> int:
    """Elements that a layer keeps of a token; latent attention keeps one vector for all heads."""
    if shape.latent is not None:
        return shape.latent.kv_lora_rank + shape.latent.qk_rope_head_dim
    return 2 * shape.num_kv_heads * shape.head_dim


def _notes(reader: CardReader, family: Family | None, layers: AttentionLayers) -> Iterator[str]:
    card = reader.card
    if family is None:
        yield (
            "weights are an estimate: biases and whatever is special to an unknown family are not "
            "counted"
        )
    if layers.num_windowed:
        window = card.get("sliding_window") or card.get("attention_chunk_size")
        size = "" if window is None else f" of {window} tokens"
        yield (
            f"{layers.num_windowed} of {len(layers.attending)} layers attend in a window{size}; "
            "they keep no more tokens than it holds"
        )
    if layers.others:
        yield f"layers of {', '.join(layers.others)} keep no keys and values; weights not counted"
    extra = card.get("num_nextn_predict_layers")
    if extra:
        yield f"weights of the layers that predict further tokens ({extra}) are not counted"
    parts = [key for key in card.scopes[-1][1] if key.startswith(("vision", "audio"))]
    if len(card.scopes) > 1 and parts:
        yield f"the language model alone is read and counted, not {', '.join(parts)}"
