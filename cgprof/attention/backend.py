"""What an attention backend does: attend over the cache, this step's keys and values included."""

from __future__ import annotations

from typing import Protocol

import torch

from cgprof.batch.context import AttentionMetadata
from cgprof.shapes import GraphSupport


class AttentionBackend(Protocol):
    """Grouped-query attention over paged KV, for any mix of prefill and decode.

    The cache of a layer is [blocks, 2, S, G, C] (keys, then values).
    """

    @property
    def graph_support(self) -> GraphSupport:
        """Which batches may be captured."""

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Attends causally over keys and values that are in their slots.

        Args:
            query: [T, H, C].
            kv_cache: This layer's cache [blocks, 2, S, G, C].
            metadata: Token i of request r, with query length q and length s, sees positions
                0 .. s - q + i.

        Returns:
            [T, H, C]; rows of padding tokens are zero.
        """
