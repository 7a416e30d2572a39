"""Attention over paged KV on the GPU, with one kernel or two."""

from __future__ import annotations

import torch

from cgprof.attention.tiles import choose_splits, choose_tile
from cgprof.batch.context import AttentionMetadata
from cgprof.errors import UnsupportedError
from cgprof.shapes import GraphSupport


class PagedAttention:
    """The Triton backend; capturable for any batch, since grids follow from the padded sizes.

    With `batch_invariant`, every batch runs the general kernel with one tile and unsplit contexts.
    A token's row of a tile then takes the same steps over the same tiles of its own context, so
    that its result is bitwise the same in any batch and in either part of a split one.
    """

    graph_support = GraphSupport.ALWAYS

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        batch_invariant: bool = False,
    ) -> None:
        """Chooses the tiles and loads the kernels.

        Raises:
            UnsupportedError: Heads that do not form groups, a head size or dtype the kernels lack.
        """
        if num_heads % num_kv_heads:
            raise UnsupportedError(
                "model.num_kv_heads",
                f"{num_heads} query heads do not divide into {num_kv_heads} groups; "
                "check the model card",
            )
        if head_dim < 16 or head_dim > 256 or head_dim & (head_dim - 1):
            raise UnsupportedError(
                "model.head_dim",
                f"the paged kernels take 16, 32, 64, 128 or 256, not {head_dim}; "
                "run this model with measure.device=cpu",
            )
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise UnsupportedError(
                "model.dtype",
                f"the paged kernels take float32, float16 or bfloat16, not {dtype}; "
                "set one of them",
            )
        self._num_kv_heads = num_kv_heads
        self._batch_invariant = batch_invariant
        self._single_token_tile, self._general_tile = (
            choose_tile(
                group=num_heads // num_kv_heads,
                head_dim=head_dim,
                dtype_bytes=dtype.itemsize,
                single_token=single_token,
            )
            for single_token in (True, False)
        )

        from cgprof.attention.paged_triton import attend_paged

        self._attend_paged = attend_paged

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Attends causally over the cache; see `AttentionBackend`.

        When `metadata.max_query_len` is 1, token i must be request i.
        """
        if self._batch_invariant:
            return self._attend_paged(query, kv_cache, metadata, self._general_tile, 1)
        single_token = metadata.max_query_len == 1
        tile = self._single_token_tile if single_token else self._general_tile
        splits = choose_splits(
            tile,
            num_tokens=query.shape[0],
            num_reqs=metadata.seq_lens.shape[0],
            num_kv_heads=self._num_kv_heads,
            max_seq_len=metadata.max_seq_len,
        )
        return self._attend_paged(query, kv_cache, metadata, tile, splits)
