"""Runs the store kernel in Triton's interpreter; one JSON line a case."""

import torch

from cgprof.kvcache.store import store_kv as store_plain
from cgprof.kvcache.store_triton import store_kv
from tests.support.interpreter import report


def main() -> None:
    for heads, dim, block_size in ((2, 16, 16), (3, 8, 4), (1, 64, 8)):
        cache = torch.randn(5, 2, block_size, heads, dim)
        expected = cache.clone()
        # Keys and values as strided views of one projection; slots in no order, two of them -1.
        rows = torch.randn(7, 4 * heads, dim)
        key, value = rows[:, heads : 2 * heads], rows[:, 3 * heads :]
        slots = torch.tensor([9, -1, 4, 17, -1, 5, 5 * block_size - 1])
        store_plain(key, value, expected, slots)
        store_kv(key, value, cache, slots)
        report(f"{heads}x{dim} in {block_size}", equal=torch.equal(cache, expected))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
