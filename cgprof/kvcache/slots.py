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
    first_tokens = np.cumsum(query_lens) - query_lens
    np.add(np.arange(len(out)), np.repeat(starts - first_tokens, query_lens), out=out)


def compute_slots(
    table_rows: NDArray[np.int32],
    starts: NDArray[np.int32],
    query_lens: NDArray[np.int32],
    block_size: int,
    out: NDArray[np.int64],
) -> None:
    """Writes the slot of each token: block * block_size + offset.

    Args:
        table_rows: [r, N] blocks of the requests.
        starts: [r] tokens that each request has in the cache already.
        query_lens: [r].
        block_size: Slots a block.
        out: [t], t the sum of query_lens.
    """
    token_positions(starts, query_lens, out)
    columns, offsets = np.divmod(out, block_size)
    requests = np.repeat(np.arange(len(query_lens)), query_lens)
    np.multiply(
        table_rows[requests, columns], block_size, out=out, casting="unsafe", dtype=np.int64
    )
    out += offsets
