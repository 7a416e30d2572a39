"""Reads the fields of a card, each with its source; sizes that are absent stay open."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from typing import NamedTuple, TypeVar

from cgprof.config.card_fields import NAMES, CardFields
from cgprof.config.dimensions import (
    read_dtype,
    read_head_dim,
    read_num_kv_heads,
    read_tied_embeddings,
)
from cgprof.config.families import FAMILIES, FamilyFacts, has_gated_ffn, ties_embeddings
from cgprof.config.layer_kinds import read_moe_layers
from cgprof.config.quantisation import Quantisation
from cgprof.config.rope import read_rope, rope_blocks
from cgprof.config.schema import DtypeName, Family
from cgprof.config.weight_sizes import ExpertShape, LatentShape, WeightShape

Value = str | int | float | bool | None
Read = TypeVar("Read", str, int, float, bool)

_NORMALISED_ROPE = ("rope_type", "type", "rope_theta", "factor")
_NOT_A_COUNT = (*("experts_per_token", "expert_ffn_size", "num_shared_experts", "shared_ffn_size"),)


class CardField(NamedTuple):
    """One field in our spelling, and the path of the key it came from, or why it has its value."""

    name: str
    value: Value
    source: str

    @property
    def shown(self) -> str:
        """The value for reading."""
        if self.value is None:
            return "-"
        return f"{self.value:g}" if isinstance(self.value, float) else str(self.value)


class CardReader:
    """The fields that were read so far are in `fields`; errors are those of the card."""

    def __init__(self, card: CardFields, family: Family | None) -> None:
        self.card = card
        self.fields: list[CardField] = []
        self._family = family
        self._facts = FamilyFacts() if family is None else FAMILIES[family]
        self._reason = "assumed" if family is None else "family default"
        self._model_type = str(card.get("model_type") or "")
        self._add("family", family or "unknown")

    def optional(self, field: str) -> int | None:
        """Returns a size, or None where the card has none; both are noted.

        Raises:
            ConfigError: It is no whole number above 0.
        """
        value = self.card.find_integer(field)
        source = self.card.sources.get(field, f"absent (no {NAMES[field][0]})")
        self.fields.append(CardField(field, value, source))
        return value

    def shape(
        self,
        num_heads: int,
        num_layers: int,
        attending: tuple[int, ...],
        stored: tuple[str, Collection[str]] | None,
    ) -> WeightShape:
        """Returns the sizes of the weights; `stored` names the tensors beside the card.

        Raises:
            ConfigError: Fields disagree, or experts have a count by a name that is not known.
        """
        hidden_size = self.optional("hidden_size")
        latent = self._latent()
        num_kv_heads = self._add("num_kv_heads", read_num_kv_heads(self.card, num_heads))
        head_dim = 0
        if latent is None:
            head_dim = self._add("head_dim", read_head_dim(self.card, hidden_size, num_heads))
        ffn_size = self.optional("ffn_size")
        vocab_size = self.optional("vocab_size")
        return WeightShape(
            num_layers=num_layers,
            attention_layers=attending,
            hidden_size=hidden_size or 0,
            vocab_size=vocab_size or 0,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            ffn_size=ffn_size or 0,
            experts=self._experts(num_layers, ffn_size),
            latent=latent,
            tied_embeddings=self._tied(stored),
            qk_norm=self._facts.qk_norm,
            gated_ffn=has_gated_ffn(self._model_type),
        )

    def rest(self, dtype: DtypeName | None, quantisation: Quantisation | None) -> DtypeName:
        """Reads what weights do not depend on; returns the dtype, `dtype` before the card's.

        Raises:
            ConfigError: Two spellings disagree, or a word is not known.
        """
        self._rope()
        self.optional("max_positions")
        eps = self.card.number("norm_eps", default=self._facts.norm_eps, reason=self._reason)
        self._add("norm_eps", eps)
        if quantisation is None:
            self._add("quantisation", "none", "no key")
        else:
            self._add("quantisation", quantisation.method, quantisation.source)
        stated = read_dtype(self.card)
        if dtype is not None:
            self.card.note("dtype", "--dtype")
            stated = dtype
        self._add("dtype", stated)
        return stated

    def _add(self, field: str, value: Read, source: str | None = None) -> Read:
        found = self.card.sources.get(field, "no key") if source is None else source
        self.fields.append(CardField(field, value, found))
        return value

    def _latent(self) -> LatentShape | None:
        if not self.card.get("kv_lora_rank"):
            return None
        sizes = {field: self.optional(field) or 0 for field in LatentShape._fields}
        if not sizes["qk_rope_head_dim"]:
            raise self.card.absent("qk_rope_head_dim")
        return LatentShape(**sizes)

    def _tied(self, stored: tuple[str, Collection[str]] | None) -> bool:
        ties = ties_embeddings(self._model_type)
        reason = f"family default of {self._model_type}" if ties else self._reason
        tied = read_tied_embeddings(self.card, stored, default=ties, reason=reason)
        return self._add("tied_embeddings", tied)

    def _experts(self, num_layers: int, ffn_size: int | None) -> ExpertShape | None:
        found = self.card.find_field("num_experts")
        if found is None or found[1] == 0:
            self._refuse_uncounted_experts()
            self._add(
                "num_experts", 0, "dense: no key counts experts" if found is None else found[0]
            )
            return None
        num_experts = self.optional("num_experts") or 0
        per_token = self.optional("experts_per_token")
        if per_token is None:
            raise self.card.absent("experts_per_token")
        width = self.card.find_integer("expert_ffn_size")
        if width is None and ffn_size is not None:
            key = self.card.sources["ffn_size"]
            self.card.note("expert_ffn_size", f"{key} (no {NAMES['expert_ffn_size'][0]})")
            width = ffn_size
        self.fields.append(
            CardField("expert_ffn_size", width, self.card.sources.get("expert_ffn_size", "absent"))
        )
        layers = read_moe_layers(self.card, num_layers)
        self._add("num_moe_layers", len(layers), "derived: num_layers and the keys that place them")
        return ExpertShape(
            layers=layers,
            num_experts=num_experts,
            ffn_size=width or 0,
            shared_ffn_size=self._shared(width),
            has_shared_gate=self.card.find("shared_expert_intermediate_size") is not None,
        )

    def _shared(self, width: int | None) -> int:
        stated = self.card.find_integer("shared_ffn_size", minimum=0)
        if stated is not None:
            return self._add("shared_ffn_size", stated)
        count = self.card.find_integer("num_shared_experts", minimum=0)
        if count is None:
            return 0
        self._add("num_shared_experts", count)
        return count * (width or 0)

    def _refuse_uncounted_experts(self) -> None:
        """A card that speaks of experts is never taken for a dense one."""
        known = {name for field in _NOT_A_COUNT for name in NAMES[field]}
        for prefix, scope in self.card.scopes:
            for key, value in scope.items():
                counts = isinstance(value, int) and not isinstance(value, bool) and value > 0
                if counts and (key in known or "expert" in key):
                    raise self.card.error(
                        f"{prefix}{key} is {value}, but no key counts the experts; looked for "
                        f"{', '.join(NAMES['num_experts'])}"
                    )

    def _rope(self) -> None:
        blocks = rope_blocks(self.card)
        by_layer = [
            path
            for path, block in blocks.items()
            if isinstance(block, dict) and any(isinstance(part, dict) for part in block.values())
        ]
        if by_layer:
            self._add("rope", "differs by layer type", by_layer[0])
            return
        rope = read_rope(self.card, default_theta=self._facts.theta, reason=self._reason)
        self._add("rope", rope.kind, ", ".join(blocks) or "no rope_parameters or rope_scaling")
        self._add("rope_theta", rope.theta, self.card.sources["rope"])
        if rope.factor is not None:
            self._add("rope_factor", rope.factor, ", ".join(blocks))
        others: dict[str, tuple[object, str]] = {}
        for path, block in blocks.items():
            assert isinstance(block, dict)  # read_rope has refused all else
            others |= {key: (value, f"{path}.{key}") for key, value in block.items()}
        for key in sorted(others.keys() - set(_NORMALISED_ROPE)):
            value, path = others[key]
            self.fields.append(CardField(f"rope_{key}", _plain(value), path))


def _plain(value: object) -> Value:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if isinstance(value, str | int) else json.dumps(value)
