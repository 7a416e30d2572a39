import pytest
import torch
from torch.nn import functional as F

from cgprof.errors import UnsupportedError
from cgprof.moe.experts import Experts, run_experts_plain
from cgprof.moe.tiles import choose_tiles
from tests.support.builders import tiny_model
from tests.support.models import RefuseHostReads
from tests.support.triton_cpu import compile_for_hopper, run_interpreted


def make_inputs(num_tokens, top_k, num_experts, hidden=32, ffn=24, routing="mixed"):
    """hidden, ids, weights, gate_up, down; ids by `routing`, with some of another rank's."""
    generator = torch.Generator().manual_seed(num_tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    if routing == "one":
        ids = torch.full((num_tokens, top_k), num_experts - 1)
    elif routing == "none":
        ids = torch.full((num_tokens, top_k), -1)
    else:
        ids = torch.rand((num_tokens, num_experts), generator=generator).topk(top_k).indices
        if routing == "low":  # experts 2 and above are empty
            ids = ids % 2
        if routing == "mixed":
            absent = torch.rand((num_tokens, top_k), generator=generator) < 0.3
            ids = ids.masked_fill(absent, -1)
    return (
        normal(num_tokens, hidden),
        ids.to(torch.int32),
        torch.rand((num_tokens, top_k), generator=generator),
        normal(num_experts, 2 * ffn, hidden) / hidden**0.5,
        normal(num_experts, hidden, ffn) / ffn**0.5,
    )


def loop_of_matmuls(hidden, expert_ids, weights, gate_up, down):
    out = torch.zeros_like(hidden)
    for t, ids in enumerate(expert_ids.tolist()):
        for k, expert in enumerate(ids):
            if expert >= 0:
                gate, up = (gate_up[expert] @ hidden[t]).chunk(2)
                out[t] += weights[t, k] * (down[expert] @ (F.silu(gate) * up))
    return out


ROUTINGS = ["mixed", "low", "one", "none"]


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("num_tokens", [1, 7, 40])
def test_plain_experts_equal_a_loop_of_matmuls(num_tokens, routing):
    inputs = make_inputs(num_tokens, 2, 5, routing=routing)
    expected = loop_of_matmuls(*inputs)
    # Freed memory full of NaN is what rows past the last offset would show.
    junk = [torch.full((num_tokens * 2, size), torch.nan) for size in (48, 32, 24)]
    del junk
    torch.testing.assert_close(run_experts_plain(*inputs), expected, rtol=1e-4, atol=1e-5)


def test_plain_experts_run_in_bfloat16():
    hidden, ids, weights, gate_up, down = make_inputs(9, 2, 5)
    expected = loop_of_matmuls(hidden, ids, weights, gate_up, down)
    found = run_experts_plain(hidden.bfloat16(), ids, weights, gate_up.bfloat16(), down.bfloat16())
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)


def test_plain_experts_never_ask_the_host():
    with RefuseHostReads():
        run_experts_plain(*make_inputs(7, 2, 5))


def test_experts_refuse_sizes_that_grouped_matmuls_cannot_run():
    with pytest.raises(UnsupportedError, match="expert_ffn_size"):
        Experts(
            tiny_model(expert_ffn_size=34),
            device=torch.device("cpu"),
            dtype=torch.float32,
            batch_invariant=False,
        )


def check_grouping(num_tokens, top_k, num_experts, block_rows, routing, device):
    from cgprof.moe.grouping_triton import group_rows

    ids = make_inputs(num_tokens, top_k, num_experts, routing=routing)[1]
    rows, experts = (x.cpu() for x in group_rows(ids.to(device), num_experts, block_rows))
    flat = ids.flatten()
    expected_rows, expected_experts = [], []
    for expert in range(num_experts):
        members = [row for row, e in enumerate(flat.tolist()) if e == expert]
        for start in range(0, len(members), block_rows):
            block = members[start : start + block_rows]
            expected_rows.append(block + [flat.numel()] * (block_rows - len(block)))
            expected_experts.append(expert)
    used = len(expected_experts)
    assert experts[:used].tolist() == expected_experts
    assert (experts[used:] == -1).all()
    assert rows[:used].tolist() == expected_rows


def check_experts(size, dtype, device, batch_invariant, total_experts=None):
    from cgprof.moe.experts_triton import run_experts

    x, ids, weights, gate_up, down = make_inputs(*size)
    x, gate_up, down = x.to(dtype), gate_up.to(dtype), down.to(dtype)
    expected = loop_of_matmuls(x.float(), ids, weights, gate_up.float(), down.float())
    inputs = [tensor.to(device) for tensor in (x, ids, weights, gate_up, down)]
    found = run_experts(*inputs, batch_invariant=batch_invariant, total_experts=total_experts)
    assert found.dtype is dtype
    tolerance = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(found.cpu().float(), expected, rtol=tolerance, atol=tolerance)


GROUPINGS = [(1, 2, 5, 16, "mixed"), (40, 2, 5, 16, "mixed"), (21, 2, 3, 16, "one")]
GROUPINGS += [(9, 2, 5, 16, "none"), (530, 2, 4, 32, "low")]
SIZES = [(1, 2, 5, 32, 24, "mixed"), (13, 2, 5, 48, 40, "one"), (9, 3, 6, 32, 16, "low")]
SIZES += [(4, 2, 5, 32, 24, "none")]


@pytest.mark.parametrize("size", GROUPINGS)
def test_grouping_lists_every_row_once_when_interpreted(size):
    run_interpreted(check_grouping, *size, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", SIZES)
def test_triton_experts_equal_a_loop_of_matmuls_when_interpreted(size, dtype):
    run_interpreted(check_experts, size, dtype, "cpu", False)


@pytest.mark.gpu
@pytest.mark.parametrize("total_experts", [8, 64])
def test_triton_experts_of_one_rank_equal_a_loop_of_matmuls_on_gpu(total_experts):
    check_experts((300, 4, 8, 128, 192, "mixed"), torch.bfloat16, "cuda", False, total_experts)


def test_tiles_do_not_depend_on_the_batch_when_invariant():
    def tiles(rows: int) -> object:
        return choose_tiles(rows, 128, torch.bfloat16, batch_invariant=True)

    assert len({tiles(rows) for rows in (8, 64, 2048, 16384)}) == 1
    chosen = [
        choose_tiles(rows, 128, torch.bfloat16, batch_invariant=False).rows
        for rows in (8, 2048, 4096, 16384)
    ]
    assert chosen == [16, 32, 64, 128]


@pytest.mark.parametrize("num_rows", [8, 2048, 4096, 16384])
def test_expert_matmuls_compile_for_hopper(num_rows):
    from cgprof.moe.experts_triton import _down_kernel, _gate_up_kernel

    tiles = choose_tiles(num_rows, 128, torch.bfloat16, batch_invariant=False)
    lists = {"block_rows": "*i32", "block_experts": "*i32", "num_rows": "i32"}
    sizes = {"HIDDEN": 2048, "FFN": 768, "BLOCK_M": tiles.rows, "EVEN_K": True}
    compile_for_hopper(
        _gate_up_kernel,
        {"hidden": "*bf16", "weight": "*bf16", "activated": "*bf16", **lists},
        {"TOP_K": 8, "BLOCK_N": tiles.gate_up.columns, "BLOCK_K": tiles.gate_up.depth, **sizes},
        num_warps=tiles.gate_up.num_warps,
        num_stages=tiles.gate_up.num_stages,
    )
    compile_for_hopper(
        _down_kernel,
        {"activated": "*bf16", "weight": "*bf16", "routing": "*fp32", "parts": "*bf16", **lists},
        {"BLOCK_N": tiles.down.columns, "BLOCK_K": tiles.down.depth, **sizes},
        num_warps=tiles.down.num_warps,
        num_stages=tiles.down.num_stages,
    )


def test_grouping_and_sum_compile_for_hopper():
    from cgprof.moe.experts_triton import _sum_kernel
    from cgprof.moe.grouping_triton import _group_kernel

    compile_for_hopper(
        _group_kernel,
        {
            "expert_ids": "*i32",
            "block_rows": "*i32",
            "block_experts": "*i32",
            "num_rows": "i32",
            "num_blocks": "i32",
        },
        {"NUM_EXPERTS": 128, "BINS": 128, "BLOCK_M": 16, "SCAN": 1024},
    )
    compile_for_hopper(
        _sum_kernel,
        {"parts": "*bf16", "expert_ids": "*i32", "sums": "*bf16"},
        {"TOP_K": 8, "HIDDEN": 2048, "NUM_EXPERTS": 128, "BLOCK_N": 1024},
    )


@pytest.mark.gpu
@pytest.mark.parametrize("size", [*GROUPINGS, (256, 8, 128, 32, "mixed"), (2048, 8, 128, 128, "")])
def test_grouping_lists_every_row_once_on_gpu(size):
    check_grouping(*size, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "size",
    [
        *SIZES,
        (33, 8, 16, 264, 136, "mixed"),
        (300, 4, 8, 128, 192, "mixed"),
        (70, 4, 8, 96, 72, "low"),
        (5, 8, 8, 576, 192, "all"),
        (300, 8, 8, 576, 192, "all"),
    ],
)
def test_triton_experts_equal_a_loop_of_matmuls_on_gpu(size, dtype, batch_invariant):
    check_experts(size, dtype, "cuda", batch_invariant)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_experts_do_not_depend_on_the_batch_when_invariant_on_gpu(dtype):
    from cgprof.moe.experts_triton import run_experts

    x, ids, weights, gate_up, down = (t.cuda() for t in make_inputs(200, 4, 16, 256, 96, "mixed"))
    x, gate_up, down = x.to(dtype), gate_up.to(dtype), down.to(dtype)
    whole = run_experts(x, ids, weights, gate_up, down, batch_invariant=True)
    for rows in (slice(0, 1), slice(3, 20), slice(100, 200)):
        part = run_experts(x[rows], ids[rows], weights[rows], gate_up, down, batch_invariant=True)
        assert torch.equal(part, whole[rows])
