"""A directory with a small model of seeded weights and a tokenizer of characters."""

import json

from safetensors.torch import save_file

from tests.support.builders import build_engine, tiny_model, tiny_run
from tests.support.tasks import character_tokenizer

CARD = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "vocab_size": 128,
    "max_position_embeddings": 4352,
    "rope_theta": 10000,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def write_model_dir(path, *, tokenizer=True):
    """Writes card, weights of seed 0 and, unless told not to, the tokenizer; returns the path."""
    engine = build_engine(tiny_run(), tiny_model())
    weights = {name: tensor.contiguous().clone() for name, tensor in engine.model.named_weights()}
    engine.close()
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CARD))
    if tokenizer:
        inner = character_tokenizer()._inner
        inner.save(str(path / "tokenizer.json"))
    return path
