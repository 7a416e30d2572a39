"""What ranks on GPUs of one host do in tests of the one-sided exchange."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from cgprof.batch.context import PlainHandoff
from cgprof.config.schema import All2AllBackend, ParallelConfig
from cgprof.errors import CgprofError
from cgprof.graphs.cuda import CudaRecorder
from cgprof.microbatch.runner import MicrobatchRunner, StreamHandoff
from cgprof.moe.backends import make_dispatcher
from cgprof.moe.kept_routing import KeptRouting
from cgprof.parallel.ep import expert_range
from tests.moe.one_sided import experts
from tests.support.builders import tiny_model

EXPERTS, TOP_K = 16, 4
BOTH = (All2AllBackend.SYMMETRIC_MEMORY, All2AllBackend.ALL_TO_ALL)


@dataclass(frozen=True)
class Shape:
    """Of a test's model and its largest step. `capacity` as of the config."""

    hidden_size: int
    max_tokens: int
    dtype: torch.dtype = torch.bfloat16
    capacity: int | None = None


def make(ranks, backend, shape, microbatches=1):
    return make_dispatcher(
        ParallelConfig(
            data_parallel_size=ranks.size,
            all2all_backend=backend,
            dispatch_capacity=shape.capacity,
        ),
        ranks,
        tiny_model(num_experts=EXPERTS, experts_per_token=TOP_K, hidden_size=shape.hidden_size),
        dtype=shape.dtype,
        max_tokens=shape.max_tokens,
        num_microbatches=microbatches,
        loopback=False,
    )


def fill(ranks, inputs, seed, target=None):
    """Writes other inputs; some rows are padding. `target`: all tokens to that rank."""
    hidden, ids, weights = inputs
    draw = torch.Generator(ranks.device).manual_seed(1000 * seed + ranks.rank)
    num_tokens = hidden.shape[0]
    scores = torch.rand(num_tokens, EXPERTS, generator=draw, device=ranks.device)
    if target is not None:
        own = expert_range(EXPERTS, ranks.size, target)
        scores[:, own.start : own.stop] += 1
    padding = torch.rand(num_tokens, 1, generator=draw, device=ranks.device) < 0.2
    ids.copy_(scores.topk(TOP_K).indices.masked_fill(padding, -1))
    weights.copy_(torch.rand(weights.shape, generator=draw, device=ranks.device))
    values = torch.randn(hidden.shape, generator=draw, device=ranks.device)
    hidden.copy_(values.masked_fill(padding, torch.nan))


def make_inputs(ranks, shape, num_tokens):
    def zeros(width, dtype):
        return torch.zeros(num_tokens, width, dtype=dtype, device=ranks.device)

    return (
        zeros(shape.hidden_size, shape.dtype),
        zeros(TOP_K, torch.int32),
        zeros(TOP_K, torch.float32),
    )


def layers(ranks, dispatcher, inputs, handoff, count=3):
    """Some layers one after the other, each with the sums of the one before."""
    hidden, ids, weights = inputs
    first = expert_range(EXPERTS, ranks.size, ranks.rank).start
    for _ in range(count):
        handle = dispatcher.dispatch(hidden, ids, weights, handoff)
        sums = experts(handle.hidden, handle.expert_ids, handle.weights, first)
        hidden = torch.tanh(dispatcher.combine(handle, sums, handoff))
    return hidden


def eager_steps(ranks, shape, sizes):
    """Whether both exchanges agree on each step in turn, and on what they dropped."""
    ours, other = (make(ranks, backend, shape) for backend in BOTH)
    same = []
    for seed, num_tokens in enumerate(sizes):
        inputs = make_inputs(ranks, shape, num_tokens)
        fill(ranks, inputs, seed, target=(None, 0, 1)[seed % 3])
        found = [layers(ranks, d, inputs, PlainHandoff()) for d in (ours, other)]
        same.append(torch.equal(*found) and bool(found[0].isfinite().all()))
        torch.cuda._sleep(20_000_000 * ranks.rank * (seed % 2))  # one rank lags behind
    return same, ours.dropped_rows(), other.dropped_rows()


def replayed_steps(ranks, shape, num_tokens, replays):
    """Whether replays of a plain graph and of a twin agree with eager all-to-all, every time.

    Between replays eager steps go through the same buffers.
    """
    compute, comm = torch.cuda.Stream(), torch.cuda.Stream()
    runner = MicrobatchRunner(2, compute_stream=compute, comm_stream=comm, timeout_s=30)
    with torch.cuda.stream(compute):
        ours, other = (make(ranks, backend, shape, microbatches=2) for backend in BOTH)
        recorder = CudaRecorder(compute, (comm,))
        whole = StreamHandoff(compute, comm)
        inputs = make_inputs(ranks, shape, num_tokens)
        out = torch.zeros_like(inputs[0])
        half = num_tokens // 2
        ours.lane = "captured"

        def plain():
            out.copy_(layers(ranks, ours, inputs, whole))

        def work(index, part):
            def run():
                rows = tuple(tensor[part] for tensor in inputs)
                out[part].copy_(layers(ranks, ours, rows, runner.handoff(index)))

            return run

        works = [work(0, slice(0, half)), work(1, slice(half, num_tokens))]

        def twin(call):
            runner.park(works, recorder.enter)
            return call(runner.release)

        fill(ranks, inputs, 0)
        recorder.warm_up(plain)
        twin(recorder.warm_up)
        recordings = [recorder.record(plain), twin(recorder.record)]
        for recording in recordings:
            recording.instantiate()
        names = [Counter(node.name for node in one.read_nodes()) for one in recordings]
        same = []
        for seed in range(replays):
            fill(ranks, inputs, seed + 1, target=(None, 0, 1)[seed % 3])
            out.fill_(torch.nan)
            if ranks.rank == seed % 2:
                torch.cuda._sleep(2_000_000)
            recordings[(seed // 2) % 2].replay()
            found = out.clone()
            if seed % 5 == 0:
                layers(ranks, ours, inputs, whole)
            expected = layers(ranks, other, inputs, whole)
            same.append(torch.equal(found, expected) and bool(found.isfinite().all()))
        for recording in recordings:
            recording.free()
    runner.close()
    return same, names


def bare_step(ranks, shape):
    """Kernels' results with the exchange, twice without it on this rank, and with it again."""
    ours = make(ranks, BOTH[0], shape)
    inputs = make_inputs(ranks, shape, shape.max_tokens)
    fill(ranks, inputs, 0)
    found, kept = [], KeptRouting()
    for complete in (False, True, True, None):
        ours.kept = None if complete is None else kept
        kept.complete = bool(complete)
        kept.begin_pass()
        # Without exchange only one rank takes a step: it must wait for nobody.
        if not complete or ranks.rank == 0:
            found.append(layers(ranks, ours, inputs, PlainHandoff(), count=1))
        torch.cuda.synchronize()
    return torch.equal(found[0], found[-1])


def refusals(ranks, shape):
    try:
        make(ranks, BOTH[0], shape)
    except CgprofError as error:
        return type(error).__name__, str(error), error.exit_code
    return None
