"""How the experts' matmuls are cut on the GPU, chosen from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulTile:
    """How one program of a grouped matmul is cut; `columns` and `depth` in elements."""

    columns: int
    depth: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTiles:
    """The tiles of both matmuls; they share the rows of a block."""

    rows: int
    gate_up: MatmulTile  # its columns are read twice: once for gate, once for up
    down: MatmulTile


# Few rows an expert: stream weights through deep pipelines of small tiles, many programs.
# Many rows an expert: tiles wide enough to reuse what was read.
_STREAM_16 = ExpertTiles(
    rows=16,
    gate_up=MatmulTile(columns=32, depth=128, num_warps=4, num_stages=4),
    down=MatmulTile(columns=64, depth=128, num_warps=4, num_stages=4),
)
_STREAM_32 = ExpertTiles(
    rows=32,
    gate_up=MatmulTile(columns=64, depth=128, num_warps=4, num_stages=3),
    down=MatmulTile(columns=64, depth=128, num_warps=4, num_stages=4),
)
_WIDE_64 = ExpertTiles(
    rows=64,
    gate_up=MatmulTile(columns=64, depth=64, num_warps=4, num_stages=3),
    down=MatmulTile(columns=128, depth=64, num_warps=4, num_stages=4),
)
_WIDE_128 = ExpertTiles(
    rows=128,
    gate_up=MatmulTile(columns=128, depth=64, num_warps=8, num_stages=4),
    down=MatmulTile(columns=256, depth=64, num_warps=8, num_stages=4),
)
_SINGLE_PRECISION = ExpertTiles(
    rows=16,
    gate_up=MatmulTile(columns=32, depth=32, num_warps=4, num_stages=2),
    down=MatmulTile(columns=32, depth=32, num_warps=4, num_stages=2),
)
_BY_MEAN_ROWS = ((4, _STREAM_16), (16, _STREAM_32), (64, _WIDE_64))


def choose_tiles(
    num_rows: int, num_experts: int, dtype: torch.dtype, *, batch_invariant: bool
) -> ExpertTiles:
    """Returns the tiles for `num_rows` (token, k) rows; one and the same when batch invariant."""
    if dtype is torch.float32:
        return _SINGLE_PRECISION
    if batch_invariant:
        return _STREAM_32
    for limit, tiles in _BY_MEAN_ROWS:
        if num_rows <= limit * num_experts:
            return tiles
    return _WIDE_128
