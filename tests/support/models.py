"""Hand-made contexts and caches for a model by itself, without an engine."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cgprof.attention.backend import AttentionBackend
from cgprof.batch.context import AttentionMetadata, ForwardContext, InputBatch, PlainHandoff
from cgprof.config.schema import ModelConfig
from cgprof.models.decoder import Decoder
from cgprof.models.zoo import build_model
from cgprof.moe.dispatcher import LocalDispatcher
from cgprof.shapes import BatchShape, GraphKey, RuntimeMode

BLOCK = 16
_HOST_READS = ("_local_scalar_dense", "nonzero", "item", "is_nonzero", "bincount", "masked_select")


class RefuseHostReads(TorchDispatchMode):
    """Fails on any operator whose result the host would have to wait for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[1].split(".")[0]
        assert name not in _HOST_READS, name
        for part in args[1] if name in ("index", "index_put_") else ():
            assert part is None or part.dtype is not torch.bool, "boolean mask"
        return func(*args, **(kwargs or {}))


def make_model(
    config: ModelConfig,
    backend: AttentionBackend,
    *,
    num_blocks: int = 32,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    batch_invariant: bool = False,
) -> Decoder:
    """A seeded model with an empty cache of `num_blocks` blocks."""
    model = build_model(
        config,
        device=torch.device(device),
        dtype=dtype,
        dispatcher=LocalDispatcher(loopback=False),
        batch_invariant=batch_invariant,
        seed=3,
    )
    shape = (config.num_layers, num_blocks, 2, BLOCK, config.num_kv_heads, config.head_dim)
    model.bind_cache(torch.zeros(shape, dtype=dtype, device=device), backend)
    return model


def make_context(
    tokens: list[list[int]], computed: list[int], *, pad_tokens: int = 0, device: str = "cpu"
) -> ForwardContext:
    """One step that runs `tokens` of each request after `computed` ones that are in the cache.

    Request r owns blocks 1 + 4 r .. 4 + 4 r.
    """
    lens = [len(part) for part in tokens]
    num_tokens = sum(lens)
    table = [[1 + 4 * r + n for n in range(4)] for r in range(len(tokens))]
    positions = [p for r, n in enumerate(lens) for p in range(computed[r], computed[r] + n)]
    owners = [r for r, n in enumerate(lens) for _ in range(n)]
    slots = [
        table[r][p // BLOCK] * BLOCK + p % BLOCK for r, p in zip(owners, positions, strict=True)
    ]
    starts = [sum(lens[:r]) for r in range(len(lens) + 1)]
    pad = [0] * pad_tokens
    ids = [token for part in tokens for token in part]

    def on_device(values, dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return ForwardContext(
        batch=InputBatch(
            shape=BatchShape(
                num_reqs=len(lens), num_tokens=num_tokens, max_query_len=max(lens), num_prefills=1
            ),
            padded=GraphKey(mode=RuntimeMode.NONE, num_tokens=num_tokens + pad_tokens),
            input_ids=on_device(ids + pad, torch.int32),
            positions=on_device(positions + pad, torch.int64),
            is_padding=on_device([False] * num_tokens + [True] * pad_tokens, torch.bool),
        ),
        attention=AttentionMetadata(
            query_start_loc=on_device(starts, torch.int32),
            seq_lens=on_device([c + n for c, n in zip(computed, lens, strict=True)], torch.int32),
            block_table=on_device(table, torch.int32),
            slot_mapping=on_device(slots + [-1] * pad_tokens, torch.int64),
            max_query_len=max(lens),
            max_seq_len=4 * BLOCK,
        ),
        tokens_per_rank=(num_tokens + pad_tokens,),
        handoff=PlainHandoff(),
    )


def run_hidden(model: Decoder, context: ForwardContext) -> torch.Tensor:
    """The hidden states [T, D] of a step, written over NaN."""
    ids = context.batch.input_ids
    weight = next(tensor for _, tensor in model.named_weights())
    out = torch.full(
        (ids.shape[0], model.config.hidden_size), torch.nan, dtype=weight.dtype, device=ids.device
    )
    model.forward(context, out)
    return out
