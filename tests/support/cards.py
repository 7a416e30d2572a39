"""Small model cards, as JSON objects and as files."""

import json
from pathlib import Path

DENSE: dict[str, object] = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
MOE: dict[str, object] = {
    **DENSE,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}


def card(base: dict[str, object], *drop: str, **changes: object) -> dict[str, object]:
    """Returns a copy of a card with keys changed and others dropped."""
    kept = {key: value for key, value in base.items() if key not in drop}
    return {**kept, **changes}


def write_card(folder: Path, content: dict[str, object], name: str = "config.json") -> str:
    """Writes a card and returns its path."""
    path = folder / name
    path.write_text(json.dumps(content))
    return str(path)
