"""How the attention kernel cuts its work, from the padded sizes alone. Pure."""

from __future__ import annotations

from dataclasses import dataclass

MAX_SPLITS = 16
# A tensor core multiplies 16 rows at least.
_MIN_ROWS = 16
# Enough programs for two on each of an H200's 132 multiprocessors.
_WANTED_PROGRAMS = 264
# Below this a part's own work is less than what merging it costs.
_MIN_TOKENS_A_SPLIT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One program's share: `rows` of (token, head of one group), `kv` positions a turn."""

    single_token: bool  # token i is request i, one a tile
    rows: int
    group_padded: int
    kv: int
    num_warps: int
    num_stages: int

    @property
    def tokens(self) -> int:
        """Query tokens of one request in a tile."""
        return self.rows // self.group_padded

    def count(self, num_tokens: int, num_reqs: int) -> int:
        """Tiles that cover any batch of this padded size; every request may waste part of one."""
        if self.single_token:
            return num_tokens
        return num_tokens // self.tokens + num_reqs + 1


def choose_tile(*, group: int, head_dim: int, dtype_bytes: int, single_token: bool) -> Tile:
    """Returns the tile for `group` query heads a KV head; it never depends on the batch's size."""
    wide = head_dim * dtype_bytes > 256
    group_padded = 1 << (group - 1).bit_length()
    if single_token:
        group_padded = max(_MIN_ROWS, group_padded)
        rows = group_padded
    else:
        rows = max(32 if wide else 64, group_padded)
    return Tile(
        single_token=single_token,
        rows=rows,
        group_padded=group_padded,
        kv=32 if wide else 64,
        num_warps=4,
        num_stages=2 if wide else 3,
    )


def choose_splits(
    tile: Tile, *, num_tokens: int, num_reqs: int, num_kv_heads: int, max_seq_len: int
) -> int:
    """Returns into how many parts each context is cut, so that small batches fill the device.

    A power of two, chosen from the padded sizes and never from the lengths.
    """
    programs = min(num_tokens, tile.count(num_tokens, num_reqs)) * num_kv_heads
    useful = min(_WANTED_PROGRAMS // max(programs, 1), max_seq_len // _MIN_TOKENS_A_SPLIT)
    return min(MAX_SPLITS, 1 << max(useful, 1).bit_length() - 1)
