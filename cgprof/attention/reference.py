"""Attention in plain torch: the oracle, and what runs without a GPU.

Shapes follow from the key alone, nothing is read back to the host, so a tape can record it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cgprof.batch.context import AttentionMetadata
from cgprof.shapes import GraphSupport

# Query tokens of one request that share a gather of its keys, when a request may have several.
_TILE_TOKENS = 8
# Stands for minus infinity where a difference of two must not be NaN.
_LOWEST = -1e30


@dataclass(frozen=True, slots=True)
class _Tiles:
    """The batch as tiles of query tokens, each tile of one request. `B` tiles of `Q` tokens."""

    rows: torch.Tensor  # [T] where each token lies in the tiles, of B * Q
    requests: torch.Tensor  # [B]
    visible: torch.Tensor  # [B, Q] positions that a token sees; 0 in padding


class ReferenceAttention:
    """Online softmax over fixed chunks of KV, in float32.

    A chunk that a token does not see leaves its result bitwise unchanged, so that results do not
    depend on `max_seq_len`.
    """

    graph_support = GraphSupport.ALWAYS

    def __init__(self, chunk_tokens: int = 128) -> None:
        self._chunk_tokens = chunk_tokens

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Attends causally over the cache; see `AttentionBackend`."""
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = kv_cache.shape[3]
        group = num_heads // num_kv_heads
        tiles = _tile_queries(num_tokens, metadata)
        num_tiles, tile_tokens = tiles.visible.shape

        scaled = query.float() * head_dim**-0.5
        tiled = scaled.new_zeros(num_tiles * tile_tokens, num_heads, head_dim)
        tiled.index_copy_(0, tiles.rows, scaled)
        # [B, G, Q * group, C]: the query heads of one KV head are rows of one matmul
        tiled = (
            tiled.view(num_tiles, tile_tokens, num_kv_heads, group, head_dim)
            .transpose(1, 2)
            .reshape(num_tiles, num_kv_heads, tile_tokens * group, head_dim)
        )
        attended = self._attend_tiles(tiled, kv_cache, metadata, tiles)
        attended = (
            attended.view(num_tiles, num_kv_heads, tile_tokens, group, head_dim)
            .transpose(1, 2)
            .reshape(num_tiles * tile_tokens, num_heads, head_dim)
        )
        return attended.index_select(0, tiles.rows).to(query.dtype)

    def _attend_tiles(
        self,
        tiled: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        tiles: _Tiles,
    ) -> torch.Tensor:
        capacity = metadata.block_table.shape[1] * kv_cache.shape[2]
        max_seq_len = min(metadata.max_seq_len, capacity)
        table = metadata.block_table.index_select(0, tiles.requests)
        group = tiled.shape[2] // tiles.visible.shape[1]
        visible = tiles.visible.repeat_interleave(group, 1)[:, None, :, None]  # [B, 1, Q*group, 1]
        last_used = (tiles.visible.amax(1, keepdim=True) - 1).clamp(min=0)  # [B, 1]

        highest = tiled.new_full((*tiled.shape[:3], 1), _LOWEST)
        total = torch.zeros_like(highest)
        attended = torch.zeros_like(tiled)
        for start in range(0, max_seq_len, self._chunk_tokens):
            positions = torch.arange(start, start + self._chunk_tokens, device=tiled.device)
            # Positions that the tile does not use read its last one: finite, and of weight zero.
            keys, values = _gather(kv_cache, table, torch.minimum(positions, last_used))
            scores = _matmul_heads(tiled, [head.transpose(1, 2) for head in keys])
            scores.masked_fill_(positions >= visible, -torch.inf)
            new_highest = torch.maximum(highest, scores.amax(3, keepdim=True))
            rescale = torch.exp(highest - new_highest)
            weights = scores.sub_(new_highest).exp_()
            total.mul_(rescale).add_(weights.sum(3, keepdim=True))
            attended.mul_(rescale).add_(_matmul_heads(weights, values))
            highest = new_highest
        return torch.where(total == 0, 0.0, attended / total)


def _tile_queries(num_tokens: int, metadata: AttentionMetadata) -> _Tiles:
    """Lays the tokens out in tiles; tokens past the last request go to tiles of their own."""
    starts = metadata.query_start_loc.long()
    num_reqs = metadata.seq_lens.shape[0]
    tokens = torch.arange(num_tokens, device=starts.device)
    owner = torch.searchsorted(starts[1:], tokens, right=True)  # R past the last request
    request = owner.clamp(max=num_reqs - 1)
    seen = metadata.seq_lens[request] - starts[request + 1] + tokens + 1
    seen = torch.where(owner < num_reqs, seen, 0)
    if metadata.max_query_len == 1:
        return _Tiles(rows=tokens, requests=request, visible=seen.unsqueeze(1))
    first_token = starts[owner]
    first_tile = first_token.div(_TILE_TOKENS, rounding_mode="floor") + owner
    rows = first_tile * _TILE_TOKENS + (tokens - first_token)
    # Each request wastes less than one tile: T // Q + R of them, and one more for padding.
    num_tiles = num_tokens // _TILE_TOKENS + num_reqs + 1
    visible = seen.new_zeros(num_tiles * _TILE_TOKENS).index_copy_(0, rows, seen)
    requests = request.new_zeros(num_tiles).index_copy_(
        0, rows.div(_TILE_TOKENS, rounding_mode="floor"), request
    )
    return _Tiles(rows=rows, requests=requests, visible=visible.view(num_tiles, _TILE_TOKENS))


def _gather(
    kv_cache: torch.Tensor, table: torch.Tensor, positions: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns float32 keys and values of positions [B, n], a tensor [B, n, C] for each KV head."""
    _, _, block_size, num_kv_heads, head_dim = kv_cache.shape
    columns = positions.div(block_size, rounding_mode="floor")
    # Row of a key: block * 2 * S + offset, where offset = position - column * S.
    rows = (table.gather(1, columns) * 2 - columns) * block_size + positions
    flat = kv_cache.view(-1, num_kv_heads * head_dim)
    shape = (*positions.shape, num_kv_heads, head_dim)
    keys = flat.index_select(0, rows.view(-1)).view(shape).float()
    values = flat.index_select(0, rows.view(-1) + block_size).view(shape).float()
    return list(keys.unbind(2)), list(values.unbind(2))


def _matmul_heads(left: torch.Tensor, right: list[torch.Tensor]) -> torch.Tensor:
    """Returns left [B, G, m, k] times right, G tensors [B, k, n], without copying right."""
    return torch.stack([torch.bmm(left[:, g], head) for g, head in enumerate(right)], 1)
