"""Compiles this room's kernels for sm_90 without a GPU; prints one JSON line each."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cgprof.attention.paged_triton import attention_kernel, merge_kernel
from cgprof.attention.tiles import MAX_SPLITS, Tile, choose_tile
from tests.support.interpreter import report

TYPES = {"fp32": 4, "fp16": 2, "bf16": 2}


def show(name: str, kernel, constants: dict[str, object], dtype: str, **config: int) -> None:
    pointers = {"query", "key", "value", "kv_cache", "out"}
    floats = {"log_sums", "partial"} | ({"out"} if constants.get("SPLIT") else set())
    integers = {"query_start_loc": "*i32", "seq_lens": "*i32", "block_table": "*i32"}
    signature = {}
    for argument in kernel.arg_names:
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in floats:
            signature[argument] = "*fp32"
        elif argument in pointers:
            signature[argument] = f"*{dtype}"
        else:
            default = "fp32" if argument == "scale" else "i32"
            signature[argument] = (integers | {"slot_mapping": "*i64"}).get(argument, default)
    # What the launcher finds at run time: aligned pointers and strides divisible by 16.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, argument in enumerate(kernel.arg_names)
        if argument in pointers or "stride" in argument
    }
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=config)
    report(
        name,
        shared_bytes=done.metadata.shared,
        async_copies=done.asm["ptx"].count("cp.async.c"),
        tensor_core=done.asm["ptx"].count("mma"),
    )


def attention(dtype: str, tile: Tile, group: int, head_dim: int, split: bool) -> None:
    kind = "single" if tile.single_token else "general"
    show(
        f"{kind} {dtype} group {group} dim {head_dim} split {split}",
        attention_kernel,
        {
            "NUM_HEADS": group * 4,
            "GROUP": group,
            "GROUP_PADDED": tile.group_padded,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": 16,
            "TILE_ROWS": tile.rows,
            "TILE_KV": tile.kv,
            "SINGLE_TOKEN": tile.single_token,
            "SPLIT": split,
            "PRECISION": "ieee" if dtype == "fp32" else "tf32",
        },
        dtype=dtype,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def main() -> None:
    for dtype, group, head_dim, single, split in (
        ("bf16", 8, 128, True, True),
        ("bf16", 8, 128, False, False),
        ("fp16", 1, 64, False, True),
        ("fp32", 2, 16, True, False),
    ):
        tile = choose_tile(
            group=group, head_dim=head_dim, dtype_bytes=TYPES[dtype], single_token=single
        )
        attention(dtype, tile, group, head_dim, split)
    show("merge", merge_kernel, {"HEAD_DIM": 128, "MAX_PARTS": MAX_SPLITS}, dtype="bf16")


if __name__ == "__main__":
    main()
