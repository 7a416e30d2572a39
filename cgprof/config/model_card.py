"""A published `config.json` -> `ModelConfig`: one spelling, and nothing guessed in silence.

`ModelConfig.sources` says for each field which key it came from, or what was assumed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, NamedTuple

from cgprof.config.bundled import bundled_names, find_bundled
from cgprof.config.card_fields import CardFields
from cgprof.config.card_limits import refuse_unsupported
from cgprof.config.rope import read_rope
from cgprof.config.schema import ModelConfig
from cgprof.config.weight_files import WeightFiles, find_weights
from cgprof.errors import ConfigError

Family = Literal["qwen3", "qwen3_moe", "llama", "llama_moe"]
Dtype = Literal["float32", "float16", "bfloat16"]

_ARCHITECTURES: dict[str, Family] = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "LlamaForCausalLM": "llama",
}
# `llama_moe` is ours: Llama's attention with the experts of Qwen3-MoE, under their tensor names.
_FAMILIES: dict[str, Family] = {
    **{family: family for family in _ARCHITECTURES.values()},
    "llama_moe": "llama_moe",
}
_MOE: frozenset[Family] = frozenset(("qwen3_moe", "llama_moe"))
_QK_NORM: frozenset[Family] = frozenset(("qwen3", "qwen3_moe"))
_DTYPES: dict[str, Dtype] = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16"}

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k")
_EXPERT_FFN = ("moe_intermediate_size", "expert_intermediate_size", "moe_ffn_hidden_size")
_ROUTING = ("norm_topk", "uniform_routing")
_UNIFORM = "cgprof_uniform_routing"


class _Experts(NamedTuple):
    num_experts: int = 0
    per_token: int = 0
    ffn_size: int = 0
    norm_topk: bool = False
    uniform_routing: bool = False


def load_model_card(
    name: str, *, where: str = "model.name (--model)", with_weights: bool = True
) -> ModelConfig:
    """Returns the model of a bundled name (whatever its case), a JSON file, or a folder with one.

    A bundled name wins over a path; write `./name` for a folder of the same name. `where` begins
    the error of a name that is neither. `with_weights` also reads what the folder's safetensors
    hold, if there are any.

    Raises:
        ConfigError: There is no such card, it is not one, the models cannot compute it, or the
            weights beside it are damaged or disagree with it.
    """
    bundled = find_bundled("models", name)
    path = bundled or _card_path(name, where)
    fields = CardFields(str(path), _read_object(path))
    if path.name != "config.json":
        return _read_model(fields, path.stem, None)
    folder = path.resolve().parent
    weights = find_weights(folder) if with_weights else None
    model = _read_model(fields, folder.name, weights)
    return model.model_copy(update={"directory": str(folder)})


def _card_path(name: str, where: str) -> Path:
    path = Path(name)
    if not name:
        raise ConfigError(where, f"is empty; bundled: {', '.join(bundled_names('models'))}")
    if path.is_dir():
        inside = path / "config.json"
        if not inside.is_file():
            raise ConfigError(name, "this directory has no config.json")
        return inside
    if not path.is_file():
        raise ConfigError(
            where,
            f"{name!r} is no file, no directory and no bundled model; "
            f"bundled: {', '.join(bundled_names('models'))}",
        )
    return path


def _read_object(path: Path) -> dict[str, object]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), "is not a text file") from error
    if not text.strip():
        raise ConfigError(str(path), "is empty")
    try:
        card = json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(str(path), f"is not JSON: {place}: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(str(path), f"cannot be read: {error}") from error
    if not isinstance(card, dict):
        kind = "a list" if isinstance(card, list) else "one value"
        raise ConfigError(str(path), f"holds {kind}, a model card is a JSON object")
    return card


def _read_model(fields: CardFields, title: str, weights: WeightFiles | None) -> ModelConfig:
    family = _family(fields)
    hidden_size = fields.integer("hidden_size", "hidden_size", "n_embd", "d_model")
    num_heads = fields.integer("num_heads", "num_attention_heads", "n_head", "num_heads")
    experts = _experts(fields, family)
    rope = read_rope(fields)
    refuse_unsupported(fields, rope)
    fields.note("qk_norm", f"family {family}")
    fields.note("weights", "none: seeded" if weights is None else weights.source)
    return ModelConfig(
        name=title,
        family=family,
        num_layers=fields.integer("num_layers", "num_hidden_layers", "n_layer", "num_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, num_heads),
        head_dim=_head_dim(fields, hidden_size, num_heads),
        ffn_size=fields.integer(
            "ffn_size",
            "intermediate_size",
            "n_inner",
            "ffn_hidden_size",
            default=0 if family in _MOE else None,
        ),
        vocab_size=fields.integer("vocab_size", "vocab_size", "padded_vocab_size"),
        num_experts=experts.num_experts,
        experts_per_token=experts.per_token,
        expert_ffn_size=experts.ffn_size,
        norm_topk=experts.norm_topk,
        uniform_routing=experts.uniform_routing,
        qk_norm=family in _QK_NORM,
        rope=rope,
        tied_embeddings=_tied_embeddings(fields, weights),
        max_positions=fields.integer(
            "max_positions", "max_position_embeddings", "n_positions", "max_sequence_length"
        ),
        norm_eps=fields.number("norm_eps", "rms_norm_eps", "norm_epsilon", default=1e-6),
        dtype=_dtype(fields),
        weights=None if weights is None else weights.identity,
        sources=fields.sources,
    )


def _family(fields: CardFields) -> Family:
    model_type = fields.card.get("model_type")
    architectures = fields.card.get("architectures") or []
    if model_type is None and not architectures:
        raise fields.error("has neither model_type nor architectures, so it is not a model card")
    if not isinstance(architectures, list):
        raise fields.error(f"architectures is {architectures!r}, expected a list of names")
    stated = {f"architecture {name!r}": _ARCHITECTURES.get(str(name)) for name in architectures}
    if model_type is not None:
        stated[f"model_type {model_type!r}"] = _FAMILIES.get(str(model_type))
    for what, family in reversed(stated.items()):
        if family is None:
            supported = ", ".join([*_FAMILIES, *_ARCHITECTURES])
            raise fields.error(f"{what} is not supported; supported: {supported}")
    families = set(stated.values())
    if len(families) > 1:
        raise fields.error(f"{' and '.join(stated)} are different families")
    fields.note("family", "architectures" if model_type is None else "model_type")
    family = families.pop()
    assert family is not None
    return family


def _tied_embeddings(fields: CardFields, weights: WeightFiles | None) -> bool:
    """The card's flag, checked against the weights; without a flag the weights decide."""
    key, head = "tie_word_embeddings", "lm_head.weight"
    if weights is None:
        return fields.boolean("tied_embeddings", key, default=False)
    has_head = head in weights.tensors
    if fields.find(key) is None:
        found = f"{'holds' if has_head else 'has no'} {head}"
        fields.note("tied_embeddings", f"{weights.source} {found} (no {key})")
        return not has_head
    tied = fields.boolean("tied_embeddings", key, default=False)
    if not tied and not has_head:
        raise fields.error(
            f"{key} is False, but {weights.source} has no output head ({head}); set it to true if "
            "the family ties them"
        )
    return tied


def _num_kv_heads(fields: CardFields, num_heads: int) -> int:
    names = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
    if fields.find(*names) is None:
        if fields.boolean("num_kv_heads", "multi_query", default=False):
            return 1
        fields.note("num_kv_heads", f"assumed: as many as query heads (no {names[0]})")
        return num_heads
    num_kv_heads = fields.integer("num_kv_heads", *names)
    if num_heads % num_kv_heads:
        raise fields.error(f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly")
    return num_kv_heads


def _head_dim(fields: CardFields, hidden_size: int, num_heads: int) -> int:
    names = ("head_dim", "attention_head_dim", "kv_channels")
    if fields.find(*names) is not None:
        head_dim = fields.integer("head_dim", *names)
    elif hidden_size % num_heads:
        raise fields.error(
            f"no head_dim, and hidden size {hidden_size} does not divide by {num_heads} heads"
        )
    else:
        head_dim = hidden_size // num_heads
        fields.note("head_dim", "derived: hidden size / query heads")
    if head_dim % 2:
        raise fields.error(f"head_dim is {head_dim}; rope needs an even one")
    return head_dim


def _experts(fields: CardFields, family: Family) -> _Experts:
    if family not in _MOE:
        found = fields.find(*_NUM_EXPERTS)
        if found is not None and found[1] != 0:
            raise fields.error(f"{found[0]} is {found[1]!r}, but family {family} has no experts")
        for field in ("num_experts", "experts_per_token", "expert_ffn_size", *_ROUTING):
            fields.note(field, f"family {family} is dense")
        return _Experts()
    experts = _Experts(
        num_experts=fields.integer("num_experts", *_NUM_EXPERTS),
        per_token=fields.integer("experts_per_token", *_EXPERTS_PER_TOKEN),
        ffn_size=fields.integer("expert_ffn_size", *_EXPERT_FFN),
        norm_topk=fields.boolean("norm_topk", "norm_topk_prob", "norm_topk", default=False),
        uniform_routing=fields.card.get(_UNIFORM) is not None
        and fields.boolean("uniform_routing", _UNIFORM, default=False),
    )
    fields.sources.setdefault("uniform_routing", f"family {family}")
    if experts.per_token > experts.num_experts:
        raise fields.error(
            f"{experts.per_token} experts per token are more than the {experts.num_experts} experts"
        )
    return experts


def _dtype(fields: CardFields) -> Dtype:
    stated = {
        key: str(fields.card[key]).removeprefix("torch.")
        for key in ("dtype", "torch_dtype")
        if fields.card.get(key) is not None
    }
    if not stated:
        fields.note("dtype", "assumed: bfloat16 (no dtype)")
        return "bfloat16"
    if len(set(stated.values())) > 1:
        both = " but ".join(f"{key} is {value!r}" for key, value in stated.items())
        raise fields.error(f"{both}; keep one")
    key, value = next(iter(stated.items()))
    if value not in _DTYPES:
        raise fields.error(f"{key} is {value!r}, expected one of {', '.join(_DTYPES)}")
    fields.note("dtype", key)
    return _DTYPES[value]
