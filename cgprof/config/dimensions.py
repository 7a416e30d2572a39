"""Fields of a model card that follow from more than one key; runs and inspections share them."""

from __future__ import annotations

from collections.abc import Collection

from cgprof.config.card_fields import NAMES, CardFields
from cgprof.config.schema import DtypeName

OUTPUT_HEAD = "lm_head.weight"
DTYPE_BYTES: dict[DtypeName, int] = {"float32": 4, "float16": 2, "bfloat16": 2}

_DTYPES: dict[str, DtypeName] = {dtype: dtype for dtype in DTYPE_BYTES}
_ASSUMED_DTYPE: DtypeName = "bfloat16"


def read_num_kv_heads(fields: CardFields, num_heads: int) -> int:
    """Returns the KV heads: as many as query heads unless the card says otherwise.

    Raises:
        ConfigError: Query heads do not share them evenly.
    """
    num_kv_heads = fields.find_integer("num_kv_heads")
    if num_kv_heads is None:
        if fields.boolean("num_kv_heads", "multi_query", default=False):
            return 1
        absent = NAMES["num_kv_heads"][0]
        fields.note("num_kv_heads", f"assumed: as many as query heads (no {absent})")
        return num_heads
    if num_heads % num_kv_heads:
        raise fields.error(f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly")
    return num_kv_heads


def read_head_dim(fields: CardFields, hidden_size: int | None, num_heads: int) -> int:
    """Returns the declared size of a head, else the one that follows from the hidden size.

    Raises:
        ConfigError: Neither is there, or the hidden size does not divide.
    """
    head_dim = fields.find_integer("head_dim")
    if head_dim is not None:
        return head_dim
    if hidden_size is None:
        raise fields.absent("head_dim")
    if hidden_size % num_heads:
        raise fields.error(
            f"no head_dim, and hidden size {hidden_size} does not divide by {num_heads} heads"
        )
    fields.note("head_dim", "derived: hidden size / query heads")
    return hidden_size // num_heads


def read_tied_embeddings(
    fields: CardFields,
    stored: tuple[str, Collection[str]] | None,
    *,
    default: bool,
    reason: str,
) -> bool:
    """Returns whether the output head is the embedding: the card's flag, checked against weights.

    Without a flag the weights decide, without both the default.

    Args:
        fields: The card.
        stored: Where the names of the stored tensors stand, and the names; None without weights.
        default: Of a card that does not say.
        reason: Whose the default is.

    Raises:
        ConfigError: The card says untied, but the weights have no output head.
    """
    flag = fields.find_field("tied_embeddings")
    if stored is None:
        return fields.boolean("tied_embeddings", default=default, reason=reason)
    source, names = stored
    has_head = any(name == OUTPUT_HEAD or name.endswith(f".{OUTPUT_HEAD}") for name in names)
    if flag is None:
        found = f"{'holds' if has_head else 'has no'} {OUTPUT_HEAD}"
        key = NAMES["tied_embeddings"][0]
        fields.note("tied_embeddings", f"{source} {found} (no {key})")
        return not has_head
    tied = fields.boolean("tied_embeddings", default=default)
    if not tied and not has_head:
        raise fields.error(
            f"{flag[0]} is False, but {source} has no output head ({OUTPUT_HEAD}): untied but no "
            "output head; set it to true if the family ties them"
        )
    return tied


def read_dtype(fields: CardFields) -> DtypeName:
    """Returns the dtype of a card under either of its keys, with or without `torch.` before it.

    Raises:
        ConfigError: It is an unknown word, or two keys disagree.
    """
    stated = {
        f"{prefix}{key}": str(scope[key]).removeprefix("torch.")
        for prefix, scope in fields.scopes
        for key in ("dtype", "torch_dtype")
        if scope.get(key) is not None
    }
    if not stated:
        fields.note("dtype", f"assumed: {_ASSUMED_DTYPE} (no dtype)")
        return _ASSUMED_DTYPE
    if len(set(stated.values())) > 1:
        both = " but ".join(f"{key} is {value!r}" for key, value in stated.items())
        raise fields.error(f"{both}; keep one")
    key, value = next(iter(stated.items()))
    if value not in _DTYPES:
        raise fields.error(f"{key} is {value!r}, expected one of {', '.join(_DTYPES)}")
    fields.note("dtype", key)
    return _DTYPES[value]
