"""The families of models: which ones run here, and what a card of each leaves unsaid."""

from __future__ import annotations

from typing import NamedTuple

from cgprof.config.card_fields import CardFields
from cgprof.config.schema import Family

ARCHITECTURES: dict[str, Family] = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "LlamaForCausalLM": "llama",
    "MixtralForCausalLM": "mixtral",
}


class FamilyFacts(NamedTuple):
    """What holds for every card of a family unless the card says otherwise."""

    is_moe: bool = False
    qk_norm: bool = False  # norms of query and key heads
    norm_topk: bool | None = None  # whether chosen experts' weights sum to one; None: the card's
    windowed: bool = True  # whether a sliding_window holds where use_sliding_window is absent
    norm_eps: float = 1e-6
    theta: float = 1e4


# Source: the defaults of the families' configuration classes in transformers 5.
# `llama_moe` is ours: Llama's attention with the experts of Qwen3-MoE, under their tensor names.
FAMILIES: dict[Family, FamilyFacts] = {
    "qwen3": FamilyFacts(qk_norm=True, windowed=False),
    "qwen3_moe": FamilyFacts(is_moe=True, qk_norm=True, windowed=False),
    "llama": FamilyFacts(),
    "mixtral": FamilyFacts(is_moe=True, norm_topk=True, norm_eps=1e-5, theta=1e6),
    "llama_moe": FamilyFacts(is_moe=True),
}

_TYING = frozenset(
    (
        *("gpt2", "gpt_bigcode", "gpt_neo", "opt", "bloom", "falcon", "mpt", "starcoder2"),
        *("cohere", "cohere2", "smollm3"),
    )
)
_UNGATED = frozenset(
    (
        *("gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "codegen", "opt", "bloom"),
        *("falcon", "mpt", "phi", "starcoder2", "nemotron"),
    )
)


def ties_embeddings(model_type: str) -> bool:
    """Returns whether models of that type tie where the card is silent; unknown ones do not."""
    return model_type in _TYING or model_type.startswith("gemma")


def has_gated_ffn(model_type: str) -> bool:
    """Returns whether feed-forward parts of that type have a gate; unknown ones do."""
    return model_type not in _UNGATED


def find_family(fields: CardFields) -> tuple[Family | None, str | None]:
    """Returns the family of a card, or None and why there is none that runs.

    Raises:
        ConfigError: `architectures` is no list.
    """
    stated: dict[str, Family | None] = {}
    for prefix, scope in reversed(fields.scopes):
        architectures = scope.get("architectures") or []
        if not isinstance(architectures, list):
            raise fields.error(f"{prefix}architectures is {architectures!r}, expected a list")
        for name in architectures:
            stated[f"{prefix}architecture {name!r}"] = ARCHITECTURES.get(str(name))
        model_type = scope.get("model_type")
        if model_type is not None:
            known = {str(family): family for family in FAMILIES}
            stated[f"{prefix}model_type {model_type!r}"] = known.get(str(model_type))
            fields.note("family", f"{prefix}model_type")
        elif architectures:
            fields.note("family", f"{prefix}architectures")
    if not stated:
        return None, "has neither model_type nor architectures, so it is not a model card"
    for what, family in reversed(stated.items()):
        if family is None:
            supported = ", ".join([*FAMILIES, *ARCHITECTURES])
            return None, f"{what} is not supported; supported: {supported}"
    families = {family for family in stated.values() if family is not None}
    if len(families) > 1:
        return None, f"{' and '.join(stated)} are different families"
    return families.pop(), None
