"""Small model directories: card, safetensors in one file or several, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

from cgprof.attention.reference import ReferenceAttention
from cgprof.config.model_card import load_model_card
from tests.support.cards import DENSE, card, write_card
from tests.support.models import make_model

LLAMA = card(DENSE, model_type="llama", eos_token_id=0)
END = "<end>"


def save_model(
    folder: Path,
    content: dict[str, object],
    *,
    dtype: torch.dtype = torch.float32,
    num_shards: int = 1,
) -> dict[str, torch.Tensor]:
    """Writes card and seeded weights and returns the weights; tensors go to the shards in turn."""
    write_card(folder, content)
    model = make_model(
        load_model_card(str(folder), with_weights=False), ReferenceAttention(), dtype=dtype
    )
    state = {name: tensor.clone() for name, tensor in model.named_weights()}
    save_state(folder, state, num_shards=num_shards)
    return state


def save_state(folder: Path, state: dict[str, torch.Tensor], *, num_shards: int = 1) -> None:
    """Writes named tensors as a checkpoint."""
    if num_shards == 1:
        save_file(state, folder / "model.safetensors")
        return
    weight_map = {}
    for shard in range(num_shards):
        name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = dict(list(state.items())[shard::num_shards])
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def byte_vocab() -> dict[str, int]:
    """The end token and every byte, in the spelling of byte-level BPE, and one merge's result."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return {token: index for index, token in enumerate([END, *alphabet, "th"])}


def save_tokenizer(folder: Path) -> None:
    """Writes a byte-level tokenizer that puts its end token before a text."""
    made = tokenizers.Tokenizer(models.BPE(byte_vocab(), [("t", "h")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, 0)]
    )
    made.save(str(folder / "tokenizer.json"))
