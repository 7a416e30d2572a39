"""Which blocks each row of the request table owns, on the host. Columns not owned hold block 0."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cgprof.errors import ConfigError
from cgprof.kvcache.pool import BlockPool


class BlockTable:
    """One row of blocks a request: the block of position p is `array[row, p // block_size]`."""

    def __init__(
        self, max_num_seqs: int, blocks_per_request: int, block_size: int, pool: BlockPool
    ) -> None:
        self.block_size = block_size
        self.array: NDArray[np.int32] = np.zeros((max_num_seqs, blocks_per_request), np.int32)
        self.num_blocks: NDArray[np.int32] = np.zeros(max_num_seqs, np.int32)
        self.pool = pool

    def ensure(self, rows: NDArray[np.int32], num_tokens: NDArray[np.int32]) -> None:
        """Grows distinct rows [r] until each holds its num_tokens [r]; all of them or none.

        Raises:
            ConfigError: A row would exceed the table, or the pool has too few free blocks.
        """
        wanted = -(-num_tokens // self.block_size)
        missing = np.maximum(wanted - self.num_blocks[rows], 0)
        total = int(missing.sum())
        if not total:
            return
        width = self.array.shape[1]
        if int(wanted.max()) > width:
            raise ConfigError(
                "--max-model-len",
                f"a request needs {int(num_tokens.max())} KV slots, its {width} blocks of "
                f"{self.block_size} hold {width * self.block_size}; raise it",
            )
        blocks = self.pool.allocate(total)
        ends = np.cumsum(missing)
        within = np.arange(total) - np.repeat(ends - missing, missing)
        grown = np.repeat(rows, missing)
        self.array[grown, self.num_blocks[grown] + within] = blocks
        self.num_blocks[rows] += missing

    def release(self, row: int) -> None:
        """Gives the row's blocks back to the pool and zeroes the row."""
        count = int(self.num_blocks[row])
        self.pool.free(self.array[row, :count].tolist())
        self.array[row, :count] = 0
        self.num_blocks[row] = 0
