import pytest
import torch

from cgprof.moe.block_layout import BlockLayout
from cgprof.moe.packing import bring_home_plain, pack_plain, unpack_plain
from cgprof.moe.traffic import RowFormat
from tests.support.models import RefuseHostReads
from tests.support.triton_cpu import compile_for_hopper, run_interpreted

# tokens, K, starts of the ranks' experts, capacity, hidden size, dtype
SIZES = [
    (1, 1, (0, 2, 4), 1, 32, torch.float32),
    (40, 2, (0, 3, 5, 8), 40, 48, torch.float32),
    (40, 3, (0, 3, 5, 8), 7, 40, torch.float16),
    (9, 6, (0, 1, 2), 9, 8, torch.float32),  # the routing is larger than the hidden states
    (530, 6, (0, 3, 8), 270, 8, torch.float32),  # several scans
    (20, 6, (0, 3, 8), 600, 8, torch.float32),  # several scans to mark what stays free
]


def make_batch(num_tokens, top_k, num_experts, hidden_size, dtype):
    """hidden, ids, weights; a fifth of the rows are padding with NaN, some ids are absent."""
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.rand(num_tokens, max(top_k, num_experts), generator=generator)
    ids = ids.topk(top_k).indices % num_experts
    ids = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.2, -1)
    padding = torch.rand(num_tokens, 1, generator=generator) < 0.2
    hidden = torch.randn(num_tokens, hidden_size, generator=generator)
    hidden = hidden.masked_fill(padding, torch.nan).to(dtype)
    weights = torch.rand(num_tokens, top_k, generator=generator)
    return hidden, ids.masked_fill(padding, -1).to(torch.int32), weights


def make_memory(size, device="cpu"):
    num_tokens, top_k, starts, capacity, hidden_size, dtype = size
    row = RowFormat(hidden_size=hidden_size, itemsize=dtype.itemsize, top_k=top_k)
    layout = BlockLayout(num_ranks=len(starts) - 1, capacity=capacity, row=row)
    batch = make_batch(num_tokens, top_k, starts[-1], hidden_size, dtype)
    blocks = torch.full((layout.rows + 1, hidden_size), torch.nan, dtype=dtype, device=device)
    layout.routing(blocks[:-1]).zero_()  # expert 0 everywhere, left by an earlier step
    dropped = torch.tensor([5], device=device)
    on_device = tuple(tensor.to(device) for tensor in batch)
    return (
        on_device,
        torch.tensor(starts, dtype=torch.int32, device=device),
        blocks,
        dropped,
        layout,
    )


def check_plain(size):
    """Each rank's block holds its tokens in order, and nothing else has an expert."""
    (hidden, ids, weights), starts, blocks, dropped, layout = make_memory(size)
    places = pack_plain(hidden, ids, weights, starts, blocks, dropped, layout)
    lost = 0
    for rank in range(layout.num_ranks):
        own = range(size[2][rank], size[2][rank + 1])
        tokens = [t for t, row in enumerate(ids.tolist()) if any(e in own for e in row)]
        kept, lost = tokens[: layout.capacity], lost + len(tokens[layout.capacity :])
        block = blocks[rank * layout.block_rows : (rank + 1) * layout.block_rows]
        assert torch.equal(block[: len(kept)], hidden[kept])
        expected = torch.full((len(ids),), -1, dtype=torch.int32)
        expected[kept] = torch.arange(len(kept), dtype=torch.int32)
        assert torch.equal(places[rank], expected)
        local, shares = unpack_plain(blocks[:-1], own, layout)
        local, shares = (
            x.view(layout.num_ranks, layout.block_rows, -1)[rank] for x in (local, shares)
        )
        sent = ids[kept]
        is_own = (sent >= own.start) & (sent < own.stop)
        assert torch.equal(local[: len(kept)], torch.where(is_own, sent - own.start, -1))
        assert torch.equal(shares[: len(kept)], weights[kept])
        assert (local[len(kept) :] == -1).all()
    assert dropped.item() == 5 + lost


@pytest.mark.parametrize("size", SIZES)
def test_blocks_hold_each_ranks_tokens_in_order(size):
    check_plain(size)


def test_blocks_are_filled_without_a_host_read():
    batch, *rest = make_memory(SIZES[1])
    with RefuseHostReads():
        places = pack_plain(*batch, *rest)
        blocks, layout = rest[1][:-1], rest[3]
        unpack_plain(blocks, range(3, 5), layout)
        bring_home_plain(blocks, places, layout)


def test_block_that_was_full_shows_no_old_row():
    (hidden, ids, weights), starts, blocks, dropped, layout = make_memory(SIZES[1])
    pack_plain(hidden, ids.clamp(min=0), weights, starts, blocks, dropped, layout)
    pack_plain(hidden, torch.full_like(ids, -1), weights, starts, blocks, dropped, layout)
    assert (unpack_plain(blocks[:-1], range(8), layout)[0] == -1).all()


def check_kernels(size, device):
    from cgprof.moe import packing_triton

    batch, starts, blocks, dropped, layout = make_memory(size)
    places = pack_plain(*batch, starts, blocks, dropped, layout)
    found_batch, found_starts, found_blocks, found_dropped, _ = make_memory(size, device)
    found_places = packing_triton.pack_blocks(
        *found_batch, found_starts, found_blocks, found_dropped, layout
    )
    assert torch.equal(found_places.cpu(), places)
    assert found_dropped.item() == dropped.item()
    tails = torch.full((layout.num_ranks * layout.tail_rows, size[4]), torch.nan).to(size[5])
    tails = tails.to(device)
    found_places = packing_triton.place_tokens(
        *found_batch[1:], found_starts, tails, found_dropped, layout
    )
    assert torch.equal(found_places.cpu(), places)
    for block, tail in zip(
        found_blocks[:-1].split(layout.block_rows), tails.split(layout.tail_rows), strict=True
    ):
        count = layout.capacity * 2 * size[1]
        routing, alone = (
            rows.reshape(-1).view(torch.int32)[:count].view(-1, 2 * size[1])
            for rows in (block[layout.capacity :], tail)
        )
        assert torch.equal(alone[:, : size[1]], routing[:, : size[1]])
        filled = (routing[:, : size[1]] >= 0).any(dim=1)
        assert torch.equal(alone[filled], routing[filled])
    parts = zip(
        blocks[:-1].split(layout.block_rows),
        found_blocks[:-1].split(layout.block_rows),
        strict=True,
    )
    for rank, (expected, found) in enumerate(parts):
        count = int((places[rank] >= 0).sum())
        assert torch.equal(found[:count].cpu(), expected[:count])
    for own in (range(size[2][1]), range(size[2][1], size[2][2])):
        local, weights = unpack_plain(blocks[:-1], own, layout)
        found = packing_triton.unpack_routing(found_blocks[:-1], own, layout)
        assert torch.equal(found[0].cpu(), local)
        has_expert = local >= 0
        assert torch.equal(found[1].cpu()[has_expert], weights[has_expert])
    returned = torch.randn(layout.rows, size[4]).to(size[5])
    taken = torch.zeros(layout.rows, dtype=torch.bool)
    for rank, rows in enumerate(places):
        taken[rows[rows >= 0] + rank * layout.block_rows] = True
    returned[~taken] = torch.nan  # no token's
    expected = bring_home_plain(returned, places, layout)
    assert expected.isfinite().all()
    sums = packing_triton.sum_blocks(returned.to(device), found_places, layout)
    assert torch.equal(sums.cpu(), expected)


@pytest.mark.parametrize("size", SIZES)
def test_kernels_equal_plain_packing_when_interpreted(size):
    run_interpreted(check_kernels, size, "cpu")


def test_packing_compiles_for_hopper():
    from cgprof.moe.packing_triton import _home_kernel, _place_kernel, _send_kernel, _unpack_kernel

    counts = {"num_tokens": "i32", "block_rows": "i32"}
    sizes = {"NUM_RANKS": 4, "HIDDEN": 2048, "BLOCK_N": 1024}
    compile_for_hopper(
        _place_kernel,
        {
            **dict.fromkeys(("expert_ids", "starts", "places", "words"), "*i32"),
            **dict.fromkeys(("num_tokens", "capacity", "block_words", "routing_word"), "i32"),
            "weights": "*fp32",
            "dropped": "*i64",
        },
        {"TOP_K": 8, "BLOCK_K": 8, "SCAN": 256},
    )
    compile_for_hopper(
        _send_kernel, {"hidden": "*bf16", "places": "*i32", "blocks": "*bf16", **counts}, sizes
    )
    compile_for_hopper(
        _unpack_kernel,
        {
            **dict.fromkeys(("words", "local_ids"), "*i32"),
            **dict.fromkeys(("num_elements", "capacity", "block_rows", "first", "past"), "i32"),
            "weights": "*fp32",
        },
        {"ROW_WORDS": 1024, "TOP_K": 8, "BLOCK": 256},
    )
    compile_for_hopper(
        _home_kernel, {"blocks": "*bf16", "places": "*i32", "sums": "*bf16", **counts}, sizes
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "size",
    [
        *SIZES,
        (2500, 2, (0, 3, 5, 8), 1100, 40, torch.float32),
        (300, 8, (0, 32, 64, 96, 128), 300, 1032, torch.bfloat16),
        (2048, 8, (0, 16, 32, 48, 64, 80, 96, 112, 128), 2048, 2048, torch.bfloat16),
    ],
)
def test_kernels_equal_plain_packing_on_gpu(size):
    check_kernels(size, "cuda")
