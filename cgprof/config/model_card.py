"""A published `config.json` -> `ModelConfig`: one spelling, and nothing guessed in silence.

`ModelConfig.sources` says for each field which key it came from, or what was assumed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from cgprof.config.bundled import bundled_names, find_bundled
from cgprof.config.card_fields import CardFields
from cgprof.config.card_limits import refuse_unsupported
from cgprof.config.dimensions import (
    read_dtype,
    read_head_dim,
    read_num_kv_heads,
    read_tied_embeddings,
)
from cgprof.config.families import FAMILIES, find_family
from cgprof.config.rope import read_rope
from cgprof.config.schema import Family, ModelConfig
from cgprof.config.weight_files import WeightFiles, find_weights
from cgprof.errors import ConfigError

_FAMILY_DEFAULT = "family default"
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
    path = find_card(name, where)
    fields = read_card(path)
    if path.name != "config.json":
        return _read_model(fields, card_title(path), None)
    folder = path.resolve().parent
    weights = find_weights(folder) if with_weights else None
    model = _read_model(fields, card_title(path), weights)
    return model.model_copy(update={"directory": str(folder)})


def find_card(name: str, where: str) -> Path:
    """Returns the file of a bundled name, a path, or a folder that has a `config.json`.

    Raises:
        ConfigError: There is none; `where` begins the error.
    """
    return find_bundled("models", name) or _card_path(name, where)


def read_card(path: Path) -> CardFields:
    """Returns the keys of a card, none of them looked at.

    Raises:
        ConfigError: The file cannot be read, or is not a JSON object.
    """
    return CardFields(str(path), _read_object(path))


def card_title(path: Path) -> str:
    """Returns what a card is called: its folder's name, or its file's."""
    return path.resolve().parent.name if path.name == "config.json" else path.stem


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
    family, problem = find_family(fields)
    if family is None:
        assert problem is not None
        raise fields.error(problem)
    facts = FAMILIES[family]
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_heads")
    experts = _experts(fields, family)
    rope = read_rope(fields, default_theta=facts.theta, reason=_FAMILY_DEFAULT)
    refuse_unsupported(fields, family, rope)
    head_dim = read_head_dim(fields, hidden_size, num_heads)
    if head_dim % 2:
        raise fields.error(f"head_dim is {head_dim}; rope needs an even one")
    fields.note("qk_norm", f"family {family}")
    fields.note("weights", "none: seeded" if weights is None else weights.source)
    stored = None if weights is None else (weights.source, weights.tensors.keys())
    return ModelConfig(
        name=title,
        family=family,
        num_layers=fields.integer("num_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=read_num_kv_heads(fields, num_heads),
        head_dim=head_dim,
        ffn_size=_ffn_size(fields, family),
        vocab_size=fields.integer("vocab_size"),
        num_experts=experts.num_experts,
        experts_per_token=experts.per_token,
        expert_ffn_size=experts.ffn_size,
        norm_topk=experts.norm_topk,
        uniform_routing=experts.uniform_routing,
        qk_norm=facts.qk_norm,
        rope=rope,
        tied_embeddings=read_tied_embeddings(fields, stored, default=False, reason=_FAMILY_DEFAULT),
        max_positions=fields.integer("max_positions"),
        norm_eps=fields.number("norm_eps", default=facts.norm_eps, reason=_FAMILY_DEFAULT),
        dtype=read_dtype(fields),
        weights=None if weights is None else weights.identity,
        sources=fields.sources,
    )


def _ffn_size(fields: CardFields, family: Family) -> int:
    if not FAMILIES[family].is_moe:
        return fields.integer("ffn_size")
    size = None if family == "mixtral" else fields.find_integer("ffn_size")
    if size is None:
        fields.note("ffn_size", f"family {family}: no layer is dense")
    return size or 0


def _experts(fields: CardFields, family: Family) -> _Experts:
    facts = FAMILIES[family]
    if not facts.is_moe:
        found = fields.find_field("num_experts")
        if found is not None and found[1] != 0:
            raise fields.error(f"{found[0]} is {found[1]!r}, but family {family} has no experts")
        for field in ("num_experts", "experts_per_token", "expert_ffn_size", *_ROUTING):
            fields.note(field, f"family {family} is dense")
        return _Experts()
    # A Mixtral card has one width, and it is the experts'.
    width = "ffn_size" if family == "mixtral" else "expert_ffn_size"
    experts = _Experts(
        num_experts=fields.integer("num_experts"),
        per_token=fields.integer("experts_per_token"),
        ffn_size=fields.integer(width),
        norm_topk=_norm_topk(fields, family),
        uniform_routing=fields.get(_UNIFORM) is not None
        and fields.boolean("uniform_routing", _UNIFORM, default=False),
    )
    fields.note("expert_ffn_size", fields.sources[width])
    fields.sources.setdefault("uniform_routing", f"family {family}")
    if experts.per_token > experts.num_experts:
        raise fields.error(
            f"{experts.per_token} experts per token are more than the {experts.num_experts} experts"
        )
    return experts


def _norm_topk(fields: CardFields, family: Family) -> bool:
    fixed = FAMILIES[family].norm_topk
    if fixed is None:
        return fields.boolean("norm_topk", default=False, reason=_FAMILY_DEFAULT)
    found = fields.find_field("norm_topk")
    if found is not None and found[1] is not fixed:
        raise fields.error(f"{found[0]} is {found[1]!r}, but family {family} has {fixed}")
    fields.note("norm_topk", f"family {family}")
    return fixed
