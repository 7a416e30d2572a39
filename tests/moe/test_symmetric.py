"""The one-sided exchange: its protocol in every order, its refusals, and its results on GPUs."""

from collections import Counter
from itertools import pairwise

import pytest
import torch

from cgprof.moe.symmetric_memory import PeerMemory, Segment
from cgprof.moe.symmetric_rendezvous import Seat, refusal
from tests.moe.symmetric_ranks import (
    Shape,
    bare_step,
    eager_steps,
    refusals,
    replayed_steps,
)
from tests.support.ranks import run_ranks

# What a rank does in a layer; each of the first four once a peer, in any order of the ranks.
PROTOCOL = (
    *("write tokens", "signal tokens", "wait tokens", "read tokens"),
    *("write sums", "signal sums", "wait sums", "read sums"),
)


def without(*steps):
    return tuple(step for step in PROTOCOL if step not in steps)


def swapped(first, second):
    order = {first: second, second: first}
    return tuple(order.get(step, step) for step in PROTOCOL)


def program(protocol, rank, size, layers):
    """(step, what, layer, peer) of a rank in order; a wait is for all peers at once."""
    peers = [peer for peer in range(size) if peer != rank]
    steps = []
    for layer in range(layers):
        for name in protocol:
            step, what = name.split()
            steps += [(step, what, layer, peer) for peer in (peers if step != "wait" else [-1])]
    return steps


def faults(protocol, size, layers):
    """What goes wrong in some order of the ranks' steps; all orders are tried."""
    programs = [program(protocol, rank, size, layers) for rank in range(size)]
    # How much of each kind a rank has done before each of its steps: all that others see of it.
    done = [[Counter()] for _ in programs]
    for counts, steps in zip(done, programs, strict=True):
        for step, what, _, peer in steps:
            counts.append(counts[-1] + Counter([(step, what, peer)]))

    def look(at, rank):
        """Whether the rank can go on, and what it reads wrongly if it does."""
        step, what, layer, peer = programs[rank][at[rank]]
        if step == "wait":
            others = [other for other in range(size) if other != rank]
            return all(done[p][at[p]]["signal", what, rank] > layer for p in others), None
        written = done[peer][at[peer]]["write", what, rank] if step == "read" else layer + 1
        if written == layer + 1:
            return True, None
        return True, "overwritten" if written > layer + 1 else "too early"

    found, seen, todo = set(), set(), [(0,) * size]
    while todo:
        at = todo.pop()
        unfinished = [rank for rank in range(size) if at[rank] < len(programs[rank])]
        looks = {rank: look(at, rank) for rank in unfinished}
        found |= {fault for _, fault in looks.values() if fault is not None}
        able = [rank for rank, (can, _) in looks.items() if can]
        if unfinished and not able:
            found.add("deadlock")
        after = {(*at[:rank], at[rank] + 1, *at[rank + 1 :]) for rank in able}
        todo += after - seen
        seen |= after
    return found


@pytest.mark.parametrize(("size", "layers"), [(2, 4), (3, 2), (4, 1)])
def test_no_order_of_the_ranks_overwrites_a_row_or_blocks(size, layers):
    assert faults(PROTOCOL, size, layers) == set()


@pytest.mark.parametrize(
    ("protocol", "found"),
    [
        (without("wait sums"), "overwritten"),
        (without("wait tokens"), "too early"),
        (swapped("write tokens", "signal tokens"), "too early"),
        (swapped("write sums", "signal sums"), "too early"),
        (swapped("signal sums", "read tokens"), "overwritten"),
        (without("signal tokens"), "deadlock"),
        (swapped("signal sums", "wait sums"), "deadlock"),
    ],
)
def test_search_through_all_orders_sees_what_a_missing_step_breaks(protocol, found):
    assert found in faults(protocol, 2, 3)


def test_halves_lie_apart_and_every_rank_finds_its_own_flag_at_its_peers():
    segment = Segment(num_ranks=3, rows=5, row_bytes=24)
    memories = [torch.zeros(segment.num_bytes, dtype=torch.uint8) for _ in range(3)]
    addresses = [memory.data_ptr() for memory in memories]
    halves = [
        [
            segment.half(i, PeerMemory(own=memories[rank], addresses=addresses), rank, torch.half)
            for i in range(2)
        ]
        for rank in range(3)
    ]
    for rank, pair in enumerate(halves):
        spans = []
        for half in pair:
            assert half.blocks.shape == (5, 12)
            parts = (half.blocks, half.flags)
            spans += [(part.data_ptr(), part.data_ptr() + part.nbytes) for part in parts]
            assert half.blocks.data_ptr() == half.blocks_at[rank]
            assert half.flags_at[rank] == half.flags[rank].data_ptr()
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        end = memories[rank].data_ptr() + segment.num_bytes
        assert memories[rank].data_ptr() <= spans[0][0]
        assert spans[-1][1] <= end
    for i in range(2):
        for writer in range(3):
            for reader in range(3):
                flag = halves[reader][i].flags[writer].data_ptr()
                assert halves[writer][i].flags_at[reader] == flag


@pytest.mark.parametrize(
    ("seats", "said"),
    [
        ([("a", 0, None), ("a", 1, None)], None),
        ([("a", 0, None), ("b", 1, None)], "rank 1 is on host b and rank 0 on a"),
        ([("a", 0, None), ("a", 0, None)], "ranks 0 and 1 both call their GPU number 0"),
        ([("a", 0, None), ("a", 1, "torch 2.0 has none")], "rank 1: torch 2.0 has none"),
    ],
)
def test_ranks_that_cannot_share_memory_are_told_why(seats, said):
    found = refusal([Seat(host=host, device=at, lacks=lacks) for host, at, lacks in seats])
    assert (found is None) if said is None else (said in str(found))


@pytest.mark.ranks(2)
def test_ranks_on_cpus_are_refused():
    for name, message, code in run_ranks(2, refusals, Shape(hidden_size=32, max_tokens=8)):
        assert (name, code) == ("UnsupportedError", 2)
        assert "--all2all-backend" in message
        assert "use all-to-all or --device cuda" in message


@pytest.mark.multigpu(2)
@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        (Shape(hidden_size=32, max_tokens=70, dtype=torch.float32), (1, 7, 70, 2, 33, 70)),
        (Shape(hidden_size=2048, max_tokens=2048), (2048, 1, 64, 257, 2048, 8)),
        (Shape(hidden_size=576, max_tokens=300, capacity=100), (300, 20, 300, 100, 150, 300)),
    ],
)
def test_eager_steps_equal_all_to_all_bit_for_bit(shape, sizes):
    for same, dropped, other in run_ranks(2, eager_steps, shape, sizes, device="cuda"):
        assert same == [True] * len(sizes)
        assert dropped == other
        assert (dropped > 0) == (shape.capacity is not None)


@pytest.mark.multigpu(2)
@pytest.mark.parametrize("num_tokens", [2, 64, 513])
def test_replays_of_plain_graphs_and_twins_equal_all_to_all_bit_for_bit(num_tokens):
    shape = Shape(hidden_size=1024, max_tokens=num_tokens)
    for same, names in run_ranks(2, replayed_steps, shape, num_tokens, 50, device="cuda"):
        assert same == [True] * 50
        for microbatches, of_graph in enumerate(names, 1):
            number = 3 * microbatches
            assert of_graph["_peer_send_kernel"] == of_graph["_peer_return_kernel"] == number
            assert of_graph["_peer_wait_kernel"] == 2 * number
            assert not any("nccl" in name.lower() for name in of_graph)


@pytest.mark.multigpu(2)
def test_step_without_exchange_waits_for_nobody():
    shape = Shape(hidden_size=64, max_tokens=40)
    assert run_ranks(2, bare_step, shape, device="cuda") == [True, True]
