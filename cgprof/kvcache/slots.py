"""Where a step's tokens lie in the KV cache. Pure numpy: no loop over requests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def token_positions(
    starts: NDArray[np.int32], query_lens: NDArray[np.int32], out: NDArray[np.int64]
) -> None:
    """Writes each token's position: request i runs positions starts[i] .. + query_lens[i] - 1.

    Args:
        starts: [r] tokens that each request has in the cache already.
        query_lens: [r].
        out: [t], t the sum of query_lens.
    """
    offsets = starts + query_lens - query_lens.cumsum()
    np.add(np.arange(out.size), np.repeat(offsets, query_lens), out=out)


def compute_slots(
    table: NDArray[np.int32],
    token_rows: NDArray[np.int32],
    positions: NDArray[np.int64],
    block_size: int,
    out: NDArray[np.int64],
) -> None:
    """Writes the slot of each token: block * block_size + offset.

    Args:
        table: [rows, N] blocks of all requests.
        token_rows: [t] the row of each token's request.
        positions: [t].
        block_size: Slots a block.
        out: [t].
    """
    columns, offsets = np.divmod(positions, block_size)
    out[:] = table[token_rows, columns]
    out *= block_size
    out += offsets
