import pytest
import torch

from tests.moe.one_sided import World, check_world
from tests.support.triton_cpu import compile_for_hopper, run_interpreted

TWO = World(starts=(0, 3, 8), top_k=2, hidden_size=40, dtype=torch.float32, tokens=((3, 7, 1),))
WORLDS = [
    TWO,
    World(starts=(0, 1, 2), top_k=2, hidden_size=8, dtype=torch.float16, tokens=((4, 9), (5,))),
    World(
        starts=(0, 3, 5, 8),
        top_k=3,
        hidden_size=16,
        dtype=torch.float32,
        tokens=((5, 2), (2,)),
        capacity=2,
    ),
]
LARGE = [
    World(
        starts=(0, 64, 128), top_k=8, hidden_size=2048, dtype=torch.bfloat16, tokens=((1, 300, 64),)
    ),
    World(
        starts=(0, 32, 64, 96, 128),
        top_k=8,
        hidden_size=576,
        dtype=torch.bfloat16,
        tokens=((256, 1, 700), (129, 256)),
        capacity=200,
    ),
    World(
        starts=(0, 3, 8), top_k=3, hidden_size=5000, dtype=torch.float32, tokens=((40, 9), (200, 3))
    ),
]


def check_seeds(world, seeds, device):
    for seed in seeds:
        check_world(world, seed, device)


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_in_any_order_get_what_moved_blocks_give_when_interpreted(world):
    run_interpreted(check_seeds, world, (0, 5), "cpu")


def check_few_blocks(world, device):
    """Each block writes several tiles of several rows."""
    from cgprof.moe import symmetric_triton

    usual = symmetric_triton.MOST_BLOCKS
    symmetric_triton.MOST_BLOCKS = 2
    try:
        check_world(world, 0, device)
    finally:
        symmetric_triton.MOST_BLOCKS = usual


MANY_ROWS = World(starts=(0, 3, 8), top_k=3, hidden_size=16, dtype=torch.float32, tokens=((13, 3),))


def test_few_blocks_write_all_rows_when_interpreted():
    run_interpreted(check_few_blocks, MANY_ROWS, "cpu")


@pytest.mark.gpu
def test_few_blocks_write_all_rows_on_gpu():
    check_few_blocks(MANY_ROWS, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("world", [*WORLDS, *LARGE])
def test_ranks_in_any_order_get_what_moved_blocks_give_on_gpu(world):
    check_seeds(world, range(6), "cuda")


def compiled(rows):
    from cgprof.moe import symmetric_triton as kernels

    addresses = {**dict.fromkeys(("blocks", "flags"), "*i64"), "ticket": "*i32"}
    sizes = {"NUM_RANKS": 4, "HIDDEN": 2048, "ROWS": rows, "BLOCK_N": 2048, "BLOCK_P": 4}
    send = {"hidden": "*bf16", "places": "*i32", "tails": "*bf16", **addresses}
    send |= dict.fromkeys(("num_tokens", "first_row", "capacity", "tail_rows"), "i32")
    give_back = {"sums": "*bf16", "expert_ids": "*i32", **addresses}
    give_back |= dict.fromkeys(("num_rows", "first_row", "block_rows"), "i32")
    waiting = {"flags": "*i64", "waited": "*i64"}
    return (
        compile_for_hopper(kernels._peer_send_kernel, send, sizes, num_warps=8),
        compile_for_hopper(
            kernels._peer_return_kernel,
            give_back,
            {**sizes, "TOP_K": 8, "BLOCK_K": 8},
            num_warps=8,
        ),
        compile_for_hopper(kernels._peer_wait_kernel, waiting, {"NUM_RANKS": 4}, num_warps=1),
    )


@pytest.mark.parametrize("rows", [1, 4])
def test_flags_are_released_and_acquired_for_the_whole_system(rows):
    *writers, waiter = compiled(rows)
    for ptx in writers:
        ended = ptx.index("atom.global.sys.acq_rel.add.u32")
        assert "bar.sync" in ptx[:ended]  # every thread of the block has written
        assert ptx.rindex("st.global.v") < ended if "st.global.v" in ptx else True
        assert ptx.index("atom.global.sys.release.add.u64") > ended
    assert "ld.global.sys.acquire.b64" in waiter or "atom.global.sys.acquire" in waiter
