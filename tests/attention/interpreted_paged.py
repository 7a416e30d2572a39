"""Runs the paged kernels in Triton's interpreter; prints one JSON line a case."""

import torch

from cgprof.attention.paged import PagedAttention
from tests.support.attention import (
    BATCHES,
    Dims,
    PagedBatch,
    differences,
    named_batch,
    store_and_attend,
)
from tests.support.interpreter import accept_loop_bounds, report

# bf16 dots are wrong in the interpreter.
SMALL = Dims(num_heads=2, num_kv_heads=1)
GROUP_3 = Dims(num_heads=6, num_kv_heads=2, block_size=8)
# SmolLM2's heads.
GROUP_3_WIDE = Dims(num_heads=9, num_kv_heads=3, head_dim=64)
SETTINGS = {
    "float32": (torch.float32, SMALL, False, tuple(BATCHES)),
    "float16": (torch.float16, Dims(), False, ("decodes with room",)),
    "float32 invariant": (torch.float32, Dims(), True, ("decodes with room",)),
    "float32 group 1": (torch.float32, Dims(num_heads=2), False, ("chunk of a prefill",)),
    "float32 group 3": (torch.float32, GROUP_3, False, ("requests without tokens",)),
    "float32 group 3 wide": (
        torch.float32,
        GROUP_3_WIDE,
        False,
        ("decodes with room", "prefill beside decodes"),
    ),
}


def attend(batch: PagedBatch, dims: Dims, invariant: bool) -> torch.Tensor:
    backend = PagedAttention(
        num_heads=dims.num_heads,
        num_kv_heads=dims.num_kv_heads,
        head_dim=dims.head_dim,
        dtype=batch.query.dtype,
        batch_invariant=invariant,
    )
    return store_and_attend(backend, batch)


def main() -> None:
    accept_loop_bounds()
    for setting, (dtype, dims, invariant, names) in SETTINGS.items():
        for name in names:
            batch = named_batch(name, dims=dims, dtype=dtype)
            out = attend(batch, dims, invariant)
            report(f"{setting}: {name}", **differences(batch, out))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
