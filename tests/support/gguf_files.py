"""Small GGUF files of the Llama architecture, written from published tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tests.support.checkpoints import byte_vocab

_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def neighbours(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Heads whose row i and row i + C / 2 lie side by side."""
    out = np.empty_like(rows)
    half = head_dim // 2
    for first in range(0, rows.shape[0], head_dim):
        for i in range(half):
            out[first + 2 * i] = rows[first + i]
            out[first + 2 * i + 1] = rows[first + half + i]
    return out


def write_gguf(
    path: Path,
    state: dict[str, torch.Tensor],
    card: dict[str, object],
    *,
    architecture: str = "llama",
    pre: str = "smollm",
    quantised: tuple[str, ...] = (),
    extra: tuple[str, ...] = (),
) -> None:
    """Writes float32 tensors, those of `quantised` as Q8_0; each name of `extra` is one more."""
    import gguf

    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("tiny")
    writer.add_license("mit")
    for key, field in (
        ("embedding_length", "hidden_size"),
        ("feed_forward_length", "intermediate_size"),
        ("block_count", "num_hidden_layers"),
        ("context_length", "max_position_embeddings"),
        ("attention.head_count", "num_attention_heads"),
        ("attention.head_count_kv", "num_key_value_heads"),
    ):
        writer.add_uint32(f"{architecture}.{key}", card[field])
    writer.add_float32(f"{architecture}.rope.freq_base", card["rope_theta"])
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", card["rms_norm_eps"])
    tokens = list(byte_vocab()) + ["unused"] * (card["vocab_size"] - len(byte_vocab()))
    tokens = [token if token != "unused" else f"unused {i}" for i, token in enumerate(tokens)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for name, tensor in state.items():
        values = tensor.float().numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = neighbours(values, card["head_dim"])
        if name in quantised:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(_name(name), values)
    for name in extra:
        writer.add_tensor(name, np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(published: str) -> str:
    if published in _WHOLE:
        return _WHOLE[published]
    _, _, layer, part = published.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{_PARTS[part]}.weight"
