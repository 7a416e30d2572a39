"""Ranks of a one-sided exchange side by side in one process, their kernels in any order allowed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from cgprof.moe.block_layout import BlockLayout
from cgprof.moe.packing import bring_home_plain, pack_plain, unpack_plain
from cgprof.moe.symmetric_memory import PeerMemory, Segment
from cgprof.moe.traffic import RowFormat


@dataclass(frozen=True)
class World:
    """Ranks, their experts' starts, and the tokens of each layer of each microbatch."""

    starts: tuple[int, ...]
    top_k: int
    hidden_size: int
    dtype: torch.dtype
    tokens: tuple[tuple[int, ...], ...]  # [microbatch][layer], alike on all ranks
    capacity: int | None = None

    @property
    def size(self) -> int:
        return len(self.starts) - 1

    def own(self, rank: int) -> range:
        return range(self.starts[rank], self.starts[rank + 1])

    def layout(self, num_tokens: int) -> BlockLayout:
        row = RowFormat(
            hidden_size=self.hidden_size, itemsize=self.dtype.itemsize, top_k=self.top_k
        )
        capacity = num_tokens if self.capacity is None else min(num_tokens, self.capacity)
        return BlockLayout(num_ranks=self.size, capacity=capacity, row=row)

    def batch(self, rank: int, microbatch: int, layer: int):
        """hidden, ids and weights; a fifth of the rows are padding with NaN."""
        generator = torch.Generator().manual_seed(1000 * rank + 100 * microbatch + layer)
        num_tokens = self.tokens[microbatch][layer]
        scores = torch.rand(num_tokens, self.starts[-1], generator=generator)
        padding = torch.rand(num_tokens, 1, generator=generator) < 0.2
        hidden = torch.randn(num_tokens, self.hidden_size, generator=generator)
        ids = scores.topk(self.top_k).indices.masked_fill(padding, -1).to(torch.int32)
        weights = torch.rand(num_tokens, self.top_k, generator=generator)
        return hidden.masked_fill(padding, torch.nan).to(self.dtype), ids, weights


def experts(hidden, local_ids, weights, first):
    """Something of each row's hidden state and experts; NaN where it has none."""
    share = torch.zeros_like(weights[:, 0])
    for ids, weight in zip(local_ids.unbind(1), weights.unbind(1), strict=True):
        share += (weight * (ids + first + 1)).masked_fill(ids < 0, 0.0)  # in one order everywhere
    sums = hidden.float() * share[:, None]
    nowhere = (local_ids < 0).all(dim=1, keepdim=True)
    return sums.masked_fill(nowhere, torch.nan).to(hidden.dtype)


def expected(world: World):
    """Every rank's results [microbatch][layer][rank] and dropped rows, by blocks that are moved."""
    starts = torch.tensor(world.starts, dtype=torch.int32)
    dropped = [torch.zeros(1, dtype=torch.int64) for _ in range(world.size)]
    results = []
    for microbatch, layers in enumerate(world.tokens):
        results.append([])
        for layer, num_tokens in enumerate(layers):
            layout = world.layout(num_tokens)
            sent, places = [], []
            for rank in range(world.size):
                blocks = torch.zeros(layout.rows + 1, world.hidden_size, dtype=world.dtype)
                batch = world.batch(rank, microbatch, layer)
                places.append(pack_plain(*batch, starts, blocks, dropped[rank], layout))
                sent.append(blocks[:-1].split(layout.block_rows))
            sums = []
            for rank in range(world.size):
                received = torch.cat([blocks[rank] for blocks in sent])
                routing = unpack_plain(received, world.own(rank), layout)
                made = experts(received, *routing, world.own(rank).start)
                sums.append(made.split(layout.block_rows))
            results[-1].append(
                [
                    bring_home_plain(torch.cat([s[rank] for s in sums]), places[rank], layout)
                    for rank in range(world.size)
                ]
            )
    return results, [int(count) for count in dropped]


@dataclass
class Step:
    """One kernel or more of a rank; it may start once `ready`."""

    run: Callable[[], None]
    ready: Callable[[], bool] = lambda: True


@dataclass
class Stream:
    """Steps of one rank and microbatch, in order; some of them on the communication stream."""

    steps: list[tuple[Step, bool]] = field(default_factory=list)
    done: int = 0


class Side:
    """One rank: its memory, and the steps of its microbatches."""

    def __init__(self, world: World, rank: int, memories, device: str) -> None:
        from cgprof.moe.packing_triton import place_tokens, sum_blocks, unpack_routing
        from cgprof.moe.symmetric_triton import return_sums, send_tokens, wait_for_peers

        self.dropped = torch.zeros(1, dtype=torch.int64, device=device)
        self.results = [[] for _ in world.tokens]
        self.streams = [Stream() for _ in world.tokens]
        starts = torch.tensor(world.starts, dtype=torch.int32, device=device)
        for microbatch, layers in enumerate(world.tokens):
            segment, owned = memories[microbatch]
            memory = PeerMemory(own=owned[rank], addresses=[m.data_ptr() for m in owned])
            tokens, sums = (segment.half(i, memory, rank, world.dtype) for i in range(2))
            most = world.layout(max(layers))
            tails = torch.zeros(
                world.size * most.tail_rows, world.hidden_size, dtype=world.dtype, device=device
            )

            def add(layer, num_tokens, tokens=tokens, sums=sums, tails=tails, m=microbatch):
                layout, found = world.layout(num_tokens), {}
                batch = [tensor.to(device) for tensor in world.batch(rank, m, layer)]
                tail = tails[: world.size * layout.tail_rows]

                def place():
                    found["places"] = place_tokens(*batch[1:], starts, tail, self.dropped, layout)

                def work():
                    received = tokens.blocks[: layout.rows]
                    found["routing"] = unpack_routing(received, world.own(rank), layout)
                    found["sums"] = experts(received, *found["routing"], world.own(rank).start)

                def send():
                    send_tokens(batch[0], found["places"], tail, tokens, rank, layout)

                def give_back():
                    return_sums(found["sums"], found["routing"][0], sums, rank, layout)

                def home():
                    blocks = sums.blocks[: layout.rows]
                    self.results[m].append(sum_blocks(blocks, found["places"], layout).cpu())

                self.streams[m].steps += [
                    (Step(place), False),
                    (Step(send), True),
                    (Step(lambda: wait_for_peers(tokens), lambda: is_ready(tokens)), True),
                    (Step(work), False),
                    (Step(give_back), True),
                    (Step(lambda: wait_for_peers(sums), lambda: is_ready(sums)), True),
                    (Step(home), False),
                ]

            for layer, num_tokens in enumerate(layers):
                add(layer, num_tokens)
        self.turns = self._turns()
        self.turn = 0

    def _turns(self):
        """Whose the communication stream's steps are, in order: a send and its wait by turns."""
        counts = [sum(comm for _, comm in stream.steps) // 2 for stream in self.streams]
        order = []
        for exchange in range(max(counts)):
            for index, count in enumerate(counts):
                if exchange < count:
                    order += [index, index]
        return order

    def startable(self):
        """The microbatches whose next step may run now."""
        found = []
        for index, stream in enumerate(self.streams):
            if stream.done == len(stream.steps):
                continue
            step, on_comm = stream.steps[stream.done]
            if (not on_comm or self.turns[self.turn] == index) and step.ready():
                found.append(index)
        return found

    def run(self, index):
        stream = self.streams[index]
        step, on_comm = stream.steps[stream.done]
        step.run()
        stream.done += 1
        self.turn += on_comm

    @property
    def is_done(self) -> bool:
        return all(stream.done == len(stream.steps) for stream in self.streams)


def is_ready(half) -> bool:
    """Whether a wait would end at once."""
    return bool((half.flags > half.waited).all())


def make_sides(world: World, device: str) -> list[Side]:
    memories = []
    for layers in world.tokens:
        rows = world.layout(max(layers)).rows
        width = world.hidden_size * world.dtype.itemsize
        segment = Segment(num_ranks=world.size, rows=rows, row_bytes=width)
        owned = [
            torch.zeros(segment.num_bytes, dtype=torch.uint8, device=device)
            for _ in range(world.size)
        ]
        memories.append((segment, owned))
    return [Side(world, rank, memories, device) for rank in range(world.size)]


def check_world(world: World, seed: int, device: str) -> None:
    """Runs the ranks' steps in an order drawn from `seed` and compares all results bit for bit.

    Seeds below the number of ranks let that rank lag behind as long as anyone else can go on.
    """
    draw = random.Random(seed)
    sides = make_sides(world, device)
    while not all(side.is_done for side in sides):
        able = [(rank, m) for rank, side in enumerate(sides) for m in side.startable()]
        assert able, "all ranks wait"
        eager = [choice for choice in able if choice[0] != seed] or able
        rank, microbatch = draw.choice(eager)
        sides[rank].run(microbatch)
    results, dropped = expected(world)
    for microbatch, layers in enumerate(results):
        for layer, of_ranks in enumerate(layers):
            for rank, result in enumerate(of_ranks):
                found = sides[rank].results[microbatch][layer]
                assert torch.equal(found, result), (microbatch, layer, rank)
    assert [int(side.dropped) for side in sides] == dropped
