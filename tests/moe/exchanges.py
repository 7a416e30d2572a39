"""What ranks do in tests of the exchange: layers whose experts are loops, hence exact by row."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn import functional as F

from cgprof.batch.context import PlainHandoff
from cgprof.config.schema import All2AllBackend, ParallelConfig
from cgprof.errors import CgprofError
from cgprof.graphs.tape import TapeRecorder
from cgprof.microbatch.runner import MicrobatchRunner
from cgprof.moe.backends import make_dispatcher
from cgprof.moe.dispatcher import LocalDispatcher
from cgprof.parallel.ep import expert_range
from tests.support.builders import tiny_model

HIDDEN, FFN = 32, 24
BACKENDS = tuple(b for b in All2AllBackend if b is not All2AllBackend.SYMMETRIC_MEMORY)  # on CPUs


@dataclass(frozen=True)
class Case:
    """Real tokens of each rank; all are padded to `num_tokens`. `target` None: random experts."""

    loads: tuple[int, ...]
    num_tokens: int
    num_experts: int = 8
    top_k: int = 2
    target: int | None = None
    one_rank_each: bool = False  # a token's experts are all of one rank
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def size(self) -> int:
        return len(self.loads)

    def batch(self, rank: int):
        """hidden [T, D], ids [T, K], weights [T, K]; padding rows hold NaN."""
        generator = torch.Generator().manual_seed(100 * self.seed + rank)
        shape = (self.num_tokens, self.num_experts)
        scores = torch.rand(shape, generator=generator)
        if self.one_rank_each:
            owners = torch.randint(0, self.size, (self.num_tokens,), generator=generator)
            for token, owner in enumerate(owners.tolist()):
                own = expert_range(self.num_experts, self.size, owner)
                scores[token, own.start : own.stop] += 1
        ids = scores.topk(self.top_k).indices.to(torch.int32)
        if self.target is not None:
            ids[:] = -1
            ids[:, 0] = self.target
        hidden = torch.randn(self.num_tokens, HIDDEN, generator=generator)
        weights = torch.rand(self.num_tokens, self.top_k, generator=generator)
        padding = torch.arange(self.num_tokens) >= self.loads[rank]
        hidden = hidden.masked_fill(padding[:, None], torch.nan).to(self.dtype)
        return hidden, ids.masked_fill(padding[:, None], -1), weights

    def weights(self):
        generator = torch.Generator().manual_seed(7)
        gate_up = torch.randn(self.num_experts, 2 * FFN, HIDDEN, generator=generator)
        down = torch.randn(self.num_experts, HIDDEN, FFN, generator=generator)
        return (gate_up / HIDDEN**0.5).to(self.dtype), (down / FFN**0.5).to(self.dtype)


def expert_parts(hidden, ids, weights, gate_up, down):
    """Each (token, k)'s weighted result [T, K, D] f32; a row's arithmetic sees no other row."""
    parts = torch.zeros(*ids.shape, hidden.shape[1])
    for t, row in enumerate(ids.tolist()):
        for k, expert in enumerate(row):
            if expert >= 0:
                gate, up = (gate_up[expert] @ hidden[t]).chunk(2)
                parts[t, k] = weights[t, k] * (down[expert] @ (F.silu(gate) * up))
    return parts


def expert_sums(hidden, ids, weights, gate_up, down):
    """Their sums [T, D] in the order of K, rounded once."""
    total = torch.zeros(hidden.shape)
    for part in expert_parts(hidden, ids, weights, gate_up, down).unbind(1):
        total += part
    return total.to(hidden.dtype)


def alone(case: Case, rank: int) -> torch.Tensor:
    """What one rank with all experts makes of `rank`'s tokens."""
    dispatcher = LocalDispatcher(loopback=False)
    handle = dispatcher.dispatch(*case.batch(rank), PlainHandoff())
    sums = expert_sums(handle.hidden, handle.expert_ids, handle.weights, *case.weights())
    return dispatcher.combine(handle, sums, PlainHandoff())


class Layer:
    """One rank's dispatcher and experts for cases like the first one."""

    def __init__(self, ranks, backend, case, *, max_tokens=None, microbatches=1, capacity=None):
        self.dispatcher = make_dispatcher(
            ParallelConfig(
                data_parallel_size=ranks.size,
                all2all_backend=backend,
                dispatch_capacity=capacity,
            ),
            ranks,
            tiny_model(num_experts=case.num_experts, experts_per_token=case.top_k),
            dtype=case.dtype,
            max_tokens=max_tokens or case.num_tokens,
            num_microbatches=microbatches,
            loopback=False,
        )
        own = expert_range(case.num_experts, ranks.size, ranks.rank)
        self.weights = [weight[own.start : own.stop] for weight in case.weights()]

    def forward(self, hidden, ids, weights, handoff):
        handle = self.dispatcher.dispatch(hidden, ids, weights, handoff)
        sums = expert_sums(handle.hidden, handle.expert_ids, handle.weights, *self.weights)
        return self.dispatcher.combine(handle, sums, handoff)


def run_cases(ranks, backend, cases, capacity=None):
    """The result of each case in turn over the same buffers, and the rows dropped after each."""
    most = max(case.num_tokens for case in cases)
    layer = Layer(ranks, backend, cases[0], max_tokens=most, capacity=capacity)
    results = []
    for case in cases:
        out = layer.forward(*case.batch(ranks.rank), PlainHandoff())
        results.append((out.clone(), layer.dispatcher.dropped_rows()))
    return results


def sum_planted(ranks, backend, values):
    """The sum home of one token of whose experts rank r makes `values[r]` in every column."""
    case = Case(loads=(1,) * ranks.size, num_tokens=1, top_k=ranks.size, num_experts=ranks.size)
    layer = Layer(ranks, backend, case)
    hidden, ids, weights = case.batch(ranks.rank)
    handle = layer.dispatcher.dispatch(hidden, ids, weights, PlainHandoff())
    hit = (handle.expert_ids >= 0).any(dim=1, keepdim=True)
    sums = torch.where(hit, torch.tensor(values[ranks.rank]), 0.0).expand(handle.hidden.shape)
    return layer.dispatcher.combine(handle, sums.contiguous(), PlainHandoff())[0, 0].item()


def run_microbatched(ranks, backend, case, cuts):
    """The case's result from microbatches on threads that take turns at each transfer."""
    bounds = list(pairwise((0, *cuts, case.num_tokens)))
    layer = Layer(ranks, backend, case, microbatches=len(bounds))
    batch = case.batch(ranks.rank)
    out = torch.full((case.num_tokens, HIDDEN), torch.nan)
    runner = MicrobatchRunner(len(bounds), compute_stream=None, comm_stream=None, timeout_s=20)

    def work(index, start, stop):
        def run():
            rows = [tensor[start:stop] for tensor in batch]
            out[start:stop] = layer.forward(*rows, runner.handoff(index))

        return run

    try:
        for _ in range(2):
            works = [work(index, *bound) for index, bound in enumerate(bounds)]
            runner.park(works, lambda index: nullcontext())
            runner.release()
    finally:
        runner.close()
    return out


class IndexedHandoff(PlainHandoff):
    """A plain handoff of microbatch `index`."""

    def __init__(self, index):
        self.index = index


def buffer_addresses(ranks, backend, case):
    """Where received rows of (microbatch, tokens) lie: one address a call, in order."""
    layer = Layer(ranks, backend, case, microbatches=2)
    addresses = []
    for index, num_tokens in ((0, case.num_tokens), (1, 2), (0, 1), (1, 3)):
        rows = [tensor[:num_tokens] for tensor in case.batch(ranks.rank)]
        handle = layer.dispatcher.dispatch(*rows, IndexedHandoff(index))
        addresses.append(handle.hidden.data_ptr())
    return addresses


def replay_recorded(ranks, backend, cases):
    """Each case's result from a tape of the first one."""
    layer = Layer(ranks, backend, cases[0])
    layer.dispatcher.lane = "captured"
    inputs = [tensor.clone() for tensor in cases[0].batch(ranks.rank)]
    out = torch.empty(cases[0].num_tokens, HIDDEN)
    gate_up, down = layer.weights

    def step():
        # Every expert on every row: the loops would read ids on the host.
        hidden, ids, weights = inputs
        handle = layer.dispatcher.dispatch(hidden, ids, weights, PlainHandoff())
        out.copy_(
            layer.dispatcher.combine(handle, _all_experts(handle, gate_up, down), PlainHandoff())
        )

    recorder = TapeRecorder(poison_dead=True)
    recorder.warm_up(step)
    recording = recorder.record(step)
    recording.instantiate()
    results = []
    for case in cases:
        for target, source in zip(inputs, case.batch(ranks.rank), strict=True):
            target.copy_(source)
        recording.replay()
        results.append(out.clone())
    return results


def _all_experts(handle, gate_up, down):
    total = torch.zeros(handle.hidden.shape)
    for expert in range(gate_up.shape[0]):
        gate, up = (handle.hidden @ gate_up[expert].T).chunk(2, dim=1)
        share = (handle.weights * (handle.expert_ids == expert)).sum(dim=1, keepdim=True)
        part = (F.silu(gate) * up) @ down[expert].T
        total += torch.where(share > 0, share * part, 0.0)
    return total


def refuse_recording(ranks):
    """What the exact exchange says to a recording, and that the ranks still exchange afterwards."""
    case = Case(loads=(2, 1), num_tokens=3)
    layer = Layer(ranks, All2AllBackend.EXACT, case)
    layer.dispatcher.lane = "captured"
    messages = []
    for attempt in (lambda work: work(), TapeRecorder().record):
        try:
            attempt(lambda: layer.forward(*case.batch(ranks.rank), PlainHandoff()))
        except CgprofError as error:
            messages.append((type(error).__name__, str(error)))
    layer.dispatcher.lane = "eager"
    out = layer.forward(*case.batch(ranks.rank), PlainHandoff())
    return messages, out


def refuse_sizes(ranks, backend):
    """What the buffers say to too many tokens and to a microbatch they were not made for."""
    case = Case(loads=(4, 4), num_tokens=4)
    layer = Layer(ranks, backend, case, microbatches=2)
    messages = []
    for index, num_tokens in ((0, 5), (1, 4), (2, 1)):
        rows = [torch.zeros(num_tokens, *t.shape[1:], dtype=t.dtype) for t in case.batch(0)]
        try:
            layer.dispatcher.dispatch(*rows, IndexedHandoff(index))
        except CgprofError as error:
            messages.append((type(error).__name__, str(error)))
    return messages
