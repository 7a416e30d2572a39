"""What a model card may ask for that our models do not compute: refused, never ignored."""

from __future__ import annotations

from cgprof.config.card_fields import CardFields
from cgprof.config.families import FAMILIES
from cgprof.config.quantisation import find_quantisation
from cgprof.config.schema import Family, RopeConfig

# key -> values that the models compute; any other is refused. Absent and null are always fine.
_ONLY: dict[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "qkv_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "num_shared_experts": (0,),
    "n_shared_experts": (0,),
    "shared_expert_intermediate_size": (0,),
    "kv_lora_rank": (0,),
}


def refuse_unsupported(fields: CardFields, family: Family, rope: RopeConfig) -> None:
    """Checks a card of a known family against what its models compute.

    Raises:
        ConfigError: The card asks for more; names the key and its value.
    """
    _refuse_quantisation(fields)
    for key, allowed in _ONLY.items():
        found = fields.find(key)
        if found is not None and found[1] not in allowed:
            raise fields.error(
                f"{found[0]} is {found[1]!r}, which is not supported; only {allowed[0]!r} is"
            )
    _refuse_windows(fields, family)
    if rope.kind not in ("default", "llama3"):
        factor = "" if rope.factor is None else f" by {rope.factor:g}"
        raise fields.error(
            f"rope scaling {rope.kind!r}{factor} is not supported, only 'llama3' is; "
            "remove it and lower max_position_embeddings to the unscaled length"
        )


def _refuse_windows(fields: CardFields, family: Family) -> None:
    window, switch = fields.get("sliding_window"), fields.get("use_sliding_window")
    in_use = FAMILIES[family].windowed if switch is None else bool(switch)
    if in_use and window is not None:
        raise fields.error(
            f"a sliding window of {window!r} is in use, which is not supported; a card whose "
            "sliding_window is null is"
        )
    layers = fields.get("layer_types") or []
    if not isinstance(layers, list):
        raise fields.error(f"layer_types is {layers!r}, expected a list")
    for index, layer in enumerate(layers):
        if layer != "full_attention":
            raise fields.error(
                f"layer_types[{index}] is {layer!r}; only 'full_attention' is supported"
            )


def _refuse_quantisation(fields: CardFields) -> None:
    found = find_quantisation(fields)
    if found is None:
        return
    path, block = found
    method = block.get("quant_method") if isinstance(block, dict) else None
    if method is None:
        problem = "names no quant_method"
    else:
        problem = f"asks for {method!r}, which is not supported"
    raise fields.error(f"{path} {problem}; supported: only unquantised cards")
