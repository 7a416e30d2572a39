"""A tape over two real ranks.

gloo has all four collectives in torch 2.13, in every dtype that the experts use. There
all_gather_into_tensor and reduce_scatter_tensor are deprecated names of all_gather_single and
reduce_scatter_single, which older releases lack; both names record the same operator.
"""

import random

import pytest
import torch
import torch.distributed as dist

from cgprof.errors import RecordingError
from cgprof.graphs.tape import TapeRecorder
from cgprof.microbatch.runner import MicrobatchRunner
from tests.support.ranks import run_ranks

SIZES = (1, 2, 4, 8)
REPLAYS = 5
WIDTH = 3
LARGE = 1 << 22  # a collective of these is under way long after it was issued
gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def all_gather(ranks, x, *, group, later):
    out = torch.empty(ranks.size * len(x), *x.shape[1:], dtype=x.dtype)
    return out, gather(out, x, group=group, async_op=later)


def reduce_scatter(ranks, x, *, group, later):
    out = torch.empty(len(x) // ranks.size, *x.shape[1:], dtype=x.dtype)
    return out, scatter(out, x, group=group, async_op=later)


def all_to_all(ranks, x, *, group, later):
    out = torch.empty_like(x)
    return out, dist.all_to_all_single(out, x, group=group, async_op=later)


def all_reduce(ranks, x, *, group, later):
    out = x.clone()
    return out, dist.all_reduce(out, group=group, async_op=later)


FORMS = (all_gather, reduce_scatter, all_to_all, all_reduce)


def rows(ranks, count, turn, dtype=torch.float32):
    """Small whole numbers [2 x count, WIDTH] that differ by rank and turn, exact in any order."""
    start = 7 * ranks.rank + turn
    values = torch.arange(start, start + 2 * count * WIDTH) % 11
    return values.view(2 * count, WIDTH).to(dtype)


def exchange(ranks, form, x, out, *, later=False):
    """A step: computes, exchanges and computes; `later` waits after other work was issued."""

    def work():
        sent = x * 2
        received, wait = form(ranks, sent, group=ranks.captured, later=later)
        other = x + 1
        if later:
            wait.wait()
        out.copy_(received[: len(out)] - 1)
        x.copy_(other)

    return work


def record(work, recorder=None):
    recording = (recorder or TapeRecorder(poison_dead=True)).record(work)
    recording.instantiate()
    return recording


def out_rows(form, x):
    return torch.zeros_like(x[: len(x) // 2] if form is reduce_scatter else x)


def replays(ranks, form, later, dtype):
    x = rows(ranks, 4, 0, dtype)
    out = out_rows(form, x)
    recording = record(exchange(ranks, form, x, out, later=later))
    found = []
    for turn in range(1, REPLAYS + 1):
        x.copy_(rows(ranks, 4, turn, dtype))
        out.zero_()
        recording.replay()
        eager_x, eager_out = rows(ranks, 4, turn, dtype), torch.zeros_like(out)
        exchange(ranks, form, eager_x, eager_out)()
        found.append(torch.equal(out, eager_out) and torch.equal(x, eager_x))
        assert out.any()
    return found, dict(recording.nodes), recording.num_nodes


@pytest.mark.ranks(2)
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_replay_issues_the_collective_again_on_new_inputs(form, later):
    for found, nodes, num_nodes in run_ranks(2, replays, form, later, torch.float32):
        assert found == [True] * REPLAYS
        assert nodes["collective"] == 1
        assert nodes["kernel"] + 1 == num_nodes


@pytest.mark.ranks(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32])
def test_collectives_of_other_dtypes_replay_too(form, dtype):
    assert all(
        found == [True] * REPLAYS for found, _, _ in run_ranks(2, replays, form, False, dtype)
    )


def large(ranks):
    x, out = torch.full((LARGE,), 1.0 + ranks.rank), torch.zeros(LARGE)

    def work():
        received, wait = all_to_all(ranks, x, group=ranks.captured, later=True)
        wait.wait()
        torch.add(received, 1, out=out)

    recording = record(work)
    x.fill_(10.0 * (1 + ranks.rank))
    out.zero_()
    recording.replay()
    return out[0].item(), out[-1].item(), out.sum(dtype=torch.float64).item()


@pytest.mark.ranks(2)
def test_replay_waits_for_the_transfer():
    assert run_ranks(2, large) == [(11.0, 21.0, 16.0 * LARGE)] * 2


def mixed_order(ranks):
    """Replays of several keys in one order on both ranks; of two forms, over both groups."""
    recorder = TapeRecorder(poison_dead=True)
    steps = {}
    for size in SIZES:
        x, out = rows(ranks, size, 0), torch.zeros(2 * size, WIDTH)

        def work(x=x, out=out):
            sent, wait = all_to_all(ranks, x + 1, group=ranks.captured, later=True)
            joined, _ = all_gather(ranks, x * 2, group=ranks.eager, later=False)
            wait.wait()
            total, _ = reduce_scatter(ranks, joined, group=ranks.captured, later=False)
            out.copy_(sent + total)

        steps[size] = (x, out, work, record(work, recorder))
    draw = random.Random(0)
    found = []
    for turn in range(40):
        size = draw.choice(SIZES)
        x, out, work, recording = steps[size]
        x.copy_(rows(ranks, size, turn))
        out.zero_()
        recording.replay()
        replayed = out.clone()
        work()
        found.append(torch.equal(replayed, out))
    return found, [dict(step[-1].nodes)["collective"] for step in steps.values()]


@pytest.mark.ranks(2)
def test_recordings_replayed_in_any_order_meet_the_same_ones_of_the_other_rank():
    assert run_ranks(2, mixed_order) == [([True] * 40, [3, 3, 3, 3])] * 2


def two_microbatches(ranks):
    """Microbatch threads that exchange in turn; each starts its transfer before the peer's."""
    recorder, runner = (
        TapeRecorder(poison_dead=True),
        MicrobatchRunner(2, compute_stream=None, comm_stream=None, timeout_s=20),
    )
    x, out = rows(ranks, 4, 0), torch.zeros(8, WIDTH)

    def half(index):
        part = slice(4 * index, 4 * index + 4)

        def work():
            y = x[part] + index
            for _ in range(2):
                received = torch.empty_like(y)
                runner.handoff(index).communicate(
                    lambda y=y, received=received: dist.all_to_all_single(
                        received, y, group=ranks.captured
                    )
                )
                y = received * 2
            out[part] = y

        return work

    def step(enter):
        runner.park([half(0), half(1)], enter)
        return runner.release

    recording = record(step(recorder.enter), recorder)
    found = []
    for turn in range(1, REPLAYS + 1):
        x.copy_(rows(ranks, 4, turn))
        out.zero_()
        recording.replay()
        replayed = out.clone()
        step(TapeRecorder().enter)()
        found.append(torch.equal(replayed, out))
    runner.close()
    return found, recording.nodes["collective"]


@pytest.mark.ranks(2)
def test_collectives_of_microbatch_threads_are_recorded_in_their_turns():
    assert run_ranks(2, two_microbatches) == [([True] * REPLAYS, 4)] * 2


def raises_half_way(ranks):
    x, issued = torch.ones(LARGE), []

    def work():
        issued.append(dist.all_reduce(x, group=ranks.captured, async_op=True))
        raise ValueError("planted")

    recorder = TapeRecorder()
    with pytest.raises(ValueError, match="planted"):
        recorder.record(work)
    done = [work.is_completed() for work in issued]
    after = rows(ranks, 2, 0)
    record(exchange(ranks, all_reduce, rows(ranks, 2, 0), after), recorder).replay()
    return done, x.sum().item(), after.sum().item()


@pytest.mark.ranks(2)
def test_recording_that_raises_leaves_no_collective_under_way():
    (done, total, after), other = run_ranks(2, raises_half_way)
    assert (done, total) == ([True], 2.0 * LARGE)
    assert other == (done, total, after)


def one_for_each(ranks):
    return [torch.zeros(2) for _ in range(ranks.size)]


def refused(ranks):
    """What each form that cannot be recorded says; a form that can be follows on the same group."""
    x, four = torch.ones(2), torch.ones(4)
    group = ranks.captured
    forms = {
        "gather": lambda: dist.all_gather(one_for_each(ranks), x, group=group),
        "scatter": lambda: dist.reduce_scatter(x, one_for_each(ranks), group=group),
        "lists": lambda: dist.all_to_all(one_for_each(ranks), one_for_each(ranks), group=group),
        "barrier": lambda: dist.barrier(group=group),
        "objects": lambda: dist.all_gather_object([None] * ranks.size, "word", group=group),
        "unequal": lambda: dist.all_to_all_single(
            torch.empty(4), four, output_split_sizes=[1, 3], input_split_sizes=[1, 3], group=group
        ),
    }
    said = {}
    for name, form in forms.items():
        with pytest.raises(RecordingError) as caught:
            TapeRecorder().record(form)
        said[name] = str(caught.value)
    equal = record(
        lambda: dist.all_to_all_single(
            four,
            four + ranks.rank,
            output_split_sizes=[2, 2],
            input_split_sizes=[2, 2],
            group=group,
        )
    )
    return said, dict(equal.nodes), four.tolist()


@pytest.mark.ranks(2)
def test_forms_that_cannot_be_recorded_are_refused_in_plain_words():
    for said, nodes, received in run_ranks(2, refused):
        unequal = said.pop("unequal")
        assert "with unequal split sizes is not permitted while recording" in unequal
        assert "need the host" in unequal
        for text in said.values():
            assert "from one tensor to one" in text
            assert "all_gather_into_tensor" in text
        assert nodes == {"kernel": 1, "collective": 1}
        assert received == [1.0, 1.0, 2.0, 2.0]
