"""Reads one value of a model card under any of its names; notes where it came from.

A composite card's language part goes before its top level; no other part is looked at. A key that
is null counts as absent. Two names of one field that disagree in one place are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

from cgprof.errors import ConfigError

# Source: the keys of published cards; the first name is the one that errors and guesses show.
NAMES: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels"),
    "ffn_size": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": (
        *("num_experts_per_tok", "num_experts_per_token", "experts_per_token"),
        *("top_k_experts", "moe_top_k"),
    ),
    "expert_ffn_size": (
        *("moe_intermediate_size", "expert_intermediate_size", "moe_ffn_hidden_size"),
    ),
    "num_shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "shared_ffn_size": ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    "kv_lora_rank": ("kv_lora_rank",),
    "q_lora_rank": ("q_lora_rank",),
    "qk_nope_head_dim": ("qk_nope_head_dim",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
    "norm_topk": ("norm_topk_prob", "norm_topk"),
    "tied_embeddings": ("tie_word_embeddings",),
    "max_positions": ("max_position_embeddings", "n_positions", "max_sequence_length"),
    "norm_eps": ("rms_norm_eps", "norm_epsilon", "layer_norm_epsilon", "layer_norm_eps"),
}
_LARGEST = 2**40
_LANGUAGE_PARTS = ("text_config", "language_config", "llm_config", "thinker_config.text_config")


class CardFields:
    """A card's keys, read by field; `sources` grows with each field that is read.

    `scopes` are the places where the keys of the language model lie, the innermost first, each
    with the path that its keys have in the card.
    """

    def __init__(self, where: str, card: Mapping[str, object]) -> None:
        self.where = where
        self.scopes = (*_language_parts(card), ("", card))
        self.sources: dict[str, str] = {}

    def error(self, problem: str) -> ConfigError:
        """Returns the error of this card."""
        return ConfigError(self.where, problem)

    def absent(self, field: str) -> ConfigError:
        """Returns the error of a field that no key holds."""
        return self.error(f"no {field}; looked for {', '.join(NAMES[field])}")

    def note(self, field: str, source: str) -> None:
        """Says where a field came from when no key holds it."""
        self.sources[field] = source

    def find(self, *names: str) -> tuple[str, object] | None:
        """Returns path and value of the first key that is present, the innermost place first.

        Raises:
            ConfigError: Two of the names hold different values in one place.
        """
        for prefix, scope in self.scopes:
            present = [
                (prefix + name, scope[name]) for name in names if scope.get(name) is not None
            ]
            for name, value in present[1:]:
                first_name, first = present[0]
                if value != first:
                    raise self.error(f"{first_name} is {first!r} but {name} is {value!r}; keep one")
            if present:
                return present[0]
        return None

    def find_field(self, field: str) -> tuple[str, object] | None:
        """Returns path and value of a field under any of its names.

        Raises:
            ConfigError: Two of its names disagree.
        """
        return self.find(*NAMES[field])

    def get(self, name: str) -> object:
        """Returns the value of a key, or None."""
        found = self.find(name)
        return None if found is None else found[1]

    def find_integer(self, field: str, *, minimum: int = 1) -> int | None:
        """Returns a whole number of at least `minimum`, or None if no key holds the field.

        Raises:
            ConfigError: It is not a whole number, or too small.
        """
        found = self.find_field(field)
        if found is None:
            return None
        self.note(field, found[0])
        return self.whole(*found, minimum=minimum)

    def integer(self, field: str) -> int:
        """Returns a whole number of at least 1.

        Raises:
            ConfigError: It is absent, not a whole number, or too small.
        """
        value = self.find_integer(field)
        if value is None:
            raise self.absent(field)
        return value

    def number(self, field: str, *, default: float, reason: str) -> float:
        """Returns a finite number above 0; `reason` says whose the default is.

        Raises:
            ConfigError: It is not such a number.
        """
        found = self.find_field(field)
        if found is None:
            self.note(field, f"{reason}: {default:g} (no {NAMES[field][0]})")
            return default
        self.note(field, found[0])
        return self.positive(*found)

    def boolean(self, field: str, *names: str, default: bool, reason: str = "assumed") -> bool:
        """Returns true or false; `names` where the field has none in the table.

        Raises:
            ConfigError: It is something else.
        """
        names = names or NAMES[field]
        found = self.find(*names)
        if found is None:
            self.note(field, f"{reason}: {default} (no {names[0]})")
            return default
        name, value = found
        self.note(field, name)
        if not isinstance(value, bool):
            raise self.error(f"{name} is {value!r}, expected true or false")
        return value

    def whole(self, name: str, value: object, *, minimum: int = 1) -> int:
        """Returns the value of a key as a whole number of at least `minimum`.

        Raises:
            ConfigError: It is not one.
        """
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(f"{name} is {value!r}, expected a whole number of at least {minimum}")
        if value > _LARGEST:
            raise self.error(f"{name} is {value}, larger than any model's")
        return value

    def positive(self, name: str, value: object) -> float:
        """Returns the value of a key as a finite number above 0.

        Raises:
            ConfigError: It is not one.
        """
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{name} is {value!r}, expected a number above 0")
        if not 0 < value <= sys.float_info.max:
            raise self.error(f"{name} is {value!r}, expected a finite number above 0")
        return float(value)


def _language_parts(card: Mapping[str, object]) -> Iterator[tuple[str, Mapping[str, object]]]:
    for path in _LANGUAGE_PARTS:
        part: object = card
        for key in path.split("."):
            part = part.get(key) if isinstance(part, Mapping) else None
        if isinstance(part, Mapping):
            yield f"{path}.", part
