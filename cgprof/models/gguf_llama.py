"""Reads a GGUF file of the Llama architecture: card, weights and tokenizer in published form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from cgprof.errors import ConfigError

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Source: the token types of the GGUF specification.
_CONTROL, _USER_DEFINED = 3, 4


class GgufLlama:
    """One GGUF file; what our Llama models do not compute is refused."""

    def __init__(self, path: Path) -> None:
        """Opens the file and checks what it is.

        Raises:
            ConfigError: The `gguf` package is missing, the file is damaged, or of another kind.
        """
        self._path = path
        self._reader = _open(path)
        architecture = self._text("general.architecture")
        if architecture != "llama":
            raise self._error(f"holds architecture {architecture!r}, only 'llama' is converted")
        if self._reader.get_field("llama.expert_count") is not None:
            raise self._error("has experts, which are not converted")
        self._heads = _Heads(
            query=self._integer("llama.attention.head_count"),
            key_value=self._integer("llama.attention.head_count_kv"),
        )
        self._tensors = {self._published(tensor): tensor for tensor in self._reader.tensors}

    @property
    def name(self) -> str:
        """What the file says it is."""
        return self._text("general.name", "unnamed")

    @property
    def license(self) -> str | None:
        """The licence that the file states for its weights."""
        return self._text("general.license", "") or None

    def card(self) -> dict[str, object]:
        """Returns the `config.json`.

        Raises:
            ConfigError: A field is missing.
        """
        hidden_size = self._integer("llama.embedding_length")
        head_dim = self._integer("llama.rope.dimension_count", hidden_size // self._heads.query)
        if head_dim * self._heads.query != hidden_size:
            raise self._error(f"rotates {head_dim} of {hidden_size // self._heads.query} columns")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": hidden_size,
            "intermediate_size": self._integer("llama.feed_forward_length"),
            "num_hidden_layers": self._integer("llama.block_count"),
            "num_attention_heads": self._heads.query,
            "num_key_value_heads": self._heads.key_value,
            "head_dim": head_dim,
            "max_position_embeddings": self._integer("llama.context_length"),
            "rms_norm_eps": self._number("llama.attention.layer_norm_rms_epsilon"),
            "rope_theta": self._number("llama.rope.freq_base", 10000.0),
            "vocab_size": len(self._list("tokenizer.ggml.tokens")),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": self._integer("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._integer("tokenizer.ggml.eos_token_id"),
            "dtype": "bfloat16",
        }

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields every tensor under its Hugging Face name, dequantised and rounded to bfloat16."""
        from gguf.quants import dequantize

        for name, tensor in self._tensors.items():
            values = dequantize(tensor.data, tensor.tensor_type).astype(
                np.float32
            )  # also a copy of the file's map
            if name.endswith("q_proj.weight"):
                values = _halves_from_pairs(values, self._heads.query)
            elif name.endswith("k_proj.weight"):
                values = _halves_from_pairs(values, self._heads.key_value)
            yield name, torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)

    def tokenizer(self) -> tokenizers.Tokenizer:
        """Returns the byte-level BPE tokenizer.

        Raises:
            ConfigError: It is of another kind.
        """
        kind = self._text("tokenizer.ggml.model"), self._text("tokenizer.ggml.pre", "default")
        if kind != ("gpt2", "smollm"):
            raise self._error(f"has a tokenizer of kind {kind}, only ('gpt2', 'smollm') is read")
        bos = self._reader.get_field("tokenizer.ggml.add_bos_token")
        if bos is not None and bos.contents():
            raise self._error("puts a token before each text, which is not converted")
        tokens = [str(token) for token in self._list("tokenizer.ggml.tokens")]
        merges = [str(pair).split(" ", 1) for pair in self._list("tokenizer.ggml.merges")]
        vocab = {token: index for index, token in enumerate(tokens)}
        made = tokenizers.Tokenizer(models.BPE(vocab, [(a, b) for a, b in merges]))
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        made.decoder = decoders.ByteLevel()
        kinds = self._list("tokenizer.ggml.token_type")
        for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
            found = [
                AddedToken(token, special=special, normalized=False)
                for token, kind_of_token in zip(tokens, kinds, strict=True)
                if kind_of_token == wanted
            ]
            (made.add_special_tokens if special else made.add_tokens)(found)
        return made

    def _published(self, tensor: ReaderTensor) -> str:
        whole = _WHOLE.get(tensor.name)
        if whole is not None:
            return whole
        prefix, _, rest = tensor.name.partition(".")
        layer, _, part = rest.partition(".")
        published = _IN_LAYER.get(part.removesuffix(".weight"))
        if prefix != "blk" or not part.endswith(".weight") or published is None:
            raise self._error(f"holds {tensor.name}, which the Llama models here do not have")
        return f"model.layers.{layer}.{published}.weight"

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(str(self._path), problem)

    def _field(self, key: str) -> object:
        field = self._reader.get_field(key)
        return None if field is None else field.contents()

    def _text(self, key: str, default: str | None = None) -> str:
        value = self._field(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self._error(f"has no text {key}")
        return value

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self._field(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int):
            raise self._error(f"has no whole number {key}")
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        value = self._field(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, float):
            raise self._error(f"has no number {key}")
        # Stored as float32: its shortest spelling is the number that was meant.
        return float(str(np.float32(value)))

    def _list(self, key: str) -> Sequence[object]:
        value = self._field(key)
        if not isinstance(value, list):
            raise self._error(f"has no list {key}")
        return value


class _Heads(NamedTuple):
    query: int
    key_value: int


def _open(path: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ConfigError(
            "the gguf package", "is not installed; pip install 'gguf>=0.17'"
        ) from error
    try:
        return GGUFReader(str(path))
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error
    except (ValueError, IndexError, KeyError) as error:
        raise ConfigError(str(path), f"is not a whole GGUF file: {error}") from error


def _halves_from_pairs(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes the order of a head's rows [heads * C, D] in GGUF, where rotated rows are neighbours.

    Ours, as published checkpoints, rotate row i of a head with row i + C / 2.
    """
    num_rows, num_columns = rows.shape
    pairs = rows.reshape(num_heads, num_rows // num_heads // 2, 2, num_columns)
    return pairs.swapaxes(1, 2).reshape(num_rows, num_columns)
