import threading
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from cgprof.errors import RecordingError
from cgprof.graphs.tape import TapeRecorder


def record(work, recorder=None):
    recording = (recorder or TapeRecorder(poison_dead=True)).record(work)
    recording.instantiate()
    return recording


def random(*size, dtype=torch.float32, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def in_place(x):
    y = x.clone()
    y[:, :3].mul_(2).add_(1)
    y.t().clamp_(-1, 1)
    y.unsqueeze_(0)
    return y.squeeze(0)


def scattered(x):
    values, indices = torch.topk(x, 3, dim=-1)
    return torch.zeros_like(x).scatter_(1, indices, values.softmax(-1))


def attended(x):
    q = x.view(8, 4, 4).transpose(0, 1)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(0, 1).reshape(8, 16)


def grouped(x):
    w = torch.linspace(-1, 1, 2 * 16 * 16).view(2, 16, 16).bfloat16()
    ends = torch.tensor([3, 8], dtype=torch.int32)
    return F.grouped_mm(x.bfloat16(), w, offs=ends).float()


def sorted_back(x):
    ordered, index = torch.sort(x, dim=0, stable=True)
    return torch.empty_like(x).scatter_(0, index, ordered * 2)


def indexed(x):
    y = torch.zeros(10, 16)
    y.index_put_((torch.arange(8) % 5,), x, accumulate=True)
    y[8:] = x[:2]
    return y[torch.tensor([9, 0, 1, 2, 3, 4, 8, 7])]


def reshaped(x):
    copied = x.t().reshape(8, 16)  # a copy
    viewed = x.reshape(16, 8).view(8, 16)  # a view
    return copied.contiguous() + viewed.contiguous()


def split_and_joined(x):
    left, right = x.chunk(2, dim=1)
    return torch.cat([right.exp(), left, left[:, :0]], dim=1)


def mixed_types(x):
    counts = (x > 0).sum(dim=1, dtype=torch.int32)
    flags = counts.ge(8)
    whole = x.to(torch.float16).view(torch.int16).long()
    return torch.where(flags[:, None], x, x.bfloat16().float()) + counts[:, None] + whole % 3


def scalars(x):
    mean = x.mean()
    return (x - mean) / x.std().clamp_min(torch.tensor(1e-3)) + x.sum() * 2


def repeated(x):
    return torch.repeat_interleave(x[:4], torch.tensor([1, 3, 0, 4]), dim=0, output_size=8)


def into_given(x):
    product = torch.empty(8, 8)
    torch.mm(x, x.t(), out=product)
    resized = torch.empty(0)
    torch.mul(product, 2, out=resized)
    return resized @ x


MODELS = {
    "linear": lambda x: F.linear(x, torch.linspace(-1, 1, 256).view(16, 16), torch.ones(16)),
    "matmul": lambda x: torch.matmul(x.view(2, 4, 16), x.t()[None])[..., :8].reshape(8, 8) @ x,
    "rms_norm": lambda x: F.rms_norm(x, (16,), torch.linspace(0, 1, 16), 1e-6) * F.silu(x),
    "cumsum": lambda x: x.cumsum(0).flip(0).roll(1, 0),
    "max": lambda x: x.max(dim=1, keepdim=True).values + x.argmin(dim=1)[:, None] - x,
    "expand": lambda x: x[:, :1].expand(8, 16) * x.unsqueeze(0).expand(3, 8, 16).sum(0),
    "strided": lambda x: x.t().exp().t() + torch.as_strided(x * 1, (8, 16), (16, 1)),
    "factories": lambda x: x + torch.arange(16.0) + torch.full((8, 1), 2.0) + torch.ones(16),
    "embedding": lambda x: F.embedding(x.argmax(1), x.repeat(2, 1)),
    "foreach": lambda x: torch._foreach_add([x * 1, x * 2], 1.0)[1],
    "double": lambda x: (x.double() ** 2).float(),
    "no_rows": lambda x: torch.cat([x[:0] * 2, x]).clone(),
    "attended": attended,
    "grouped": grouped,
    "in_place": in_place,
    "indexed": indexed,
    "into_given": into_given,
    "mixed_types": mixed_types,
    "repeated": repeated,
    "reshaped": reshaped,
    "scalars": scalars,
    "scattered": scattered,
    "sorted_back": sorted_back,
    "split_and_joined": split_and_joined,
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", MODELS)
def test_replay_equals_eager_bit_for_bit_with_new_values(name):
    model = MODELS[name]
    x, out = random(8, 16), torch.full((8, 16), -1.0)
    recording = record(lambda: out.copy_(model(model(x) * 0.5)))
    for seed in range(1, 4):
        x.copy_(random(8, 16, seed=seed))
        out.fill_(float("nan"))
        recording.replay()
        assert torch.equal(out, model(model(x) * 0.5))
        assert torch.isfinite(out).all()


def test_replay_writes_a_kv_cache_in_place_and_reads_it_back():
    cache, slots = torch.zeros(12, 4), torch.tensor([2, 3])
    key, out = random(2, 4), torch.zeros(2, 4)

    def work():
        cache.view(3, 4, 4)[slots // 4, slots % 4] = key
        out.copy_(cache.index_select(0, slots) * cache.sum())

    recording = record(work)
    cache.zero_()
    key.fill_(2)
    slots.copy_(torch.tensor([9, 0]))
    recording.replay()
    assert cache.sum(1).tolist() == [8, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0]
    assert out.tolist() == [[32.0] * 4] * 2


def test_replay_freezes_python_values():
    factor, x, out = [2.0], torch.ones(3), torch.zeros(3)
    recording = record(lambda: out.copy_(x * factor[0]))
    factor[0] = 5.0
    x.fill_(10)
    recording.replay()
    assert out.tolist() == [20.0] * 3


def test_replay_does_not_run_the_work():
    calls = []
    x = torch.zeros(2)
    recording = record(lambda: (calls.append(1), x.add_(1)))
    recording.replay()
    recording.replay()
    assert (len(calls), x.tolist()) == (1, [3.0, 3.0])


def test_replay_leaves_metadata_changes_out():
    x, out = random(2, 3), torch.zeros(3, 2)

    def work():
        y = x * 2
        y.t_()
        out.copy_(y)

    recording = record(work)
    for _ in range(3):
        recording.replay()
        assert torch.equal(out, (x * 2).t())


def test_random_numbers_advance_at_each_replay_and_follow_the_seed():
    out = torch.zeros(64)
    recording = record(lambda: out.copy_(torch.rand(64) + torch.empty(64).normal_()))
    torch.manual_seed(1)
    recording.replay()
    first = out.clone()
    recording.replay()
    second = out.clone()
    torch.manual_seed(1)
    recording.replay()
    assert torch.equal(out, first)
    assert not torch.equal(second, first)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(64) + torch.empty(64).normal_(), first)


def test_a_tensor_that_outlives_the_recording_sees_replays():
    kept = []
    x = torch.ones(4)
    recorder = TapeRecorder(poison_dead=True)
    recording = record(lambda: kept.append((x * 3)[1:]), recorder)
    x.fill_(2)
    recording.replay()
    assert kept[0].tolist() == [6.0] * 3
    assert recorder.arena.num_bytes == 0
    assert recording.pool_bytes == 16


REFUSED = {
    "item": (lambda x: x.sum().item(), "_local_scalar_dense|item"),
    "float": (lambda x: float(x[0, 0]), "_local_scalar_dense|item"),
    "bool": (lambda x: bool((x > 0).any()), "is_nonzero|_local_scalar_dense|item"),
    "nonzero": (lambda x: x.nonzero(), "nonzero"),
    "where": (lambda x: torch.where(x > 0), "where"),
    "argwhere": (lambda x: torch.argwhere(x), "argwhere"),
    "mask read": (lambda x: x[x > 0], "index.Tensor with a mask"),
    "mask of bytes": (lambda x: x[(x > 0).byte()], "index.Tensor with a mask"),
    "mask write": (lambda x: x.__setitem__(x > 0, 0.0), "index_put_ with a mask"),
    "masked_select": (lambda x: torch.masked_select(x, x > 0), "masked_select"),
    "unique": (lambda x: torch.unique(x), "unique"),
    "unique_consecutive": (lambda x: torch.unique_consecutive(x), "unique_consecutive"),
    "bincount": (lambda x: torch.bincount(x.flatten().abs().long()), "bincount"),
    "equal": (lambda x: torch.equal(x, x), "equal"),
    "allclose": (lambda x: torch.allclose(x, x), "allclose"),
    "repeats": (lambda x: x.repeat_interleave(torch.arange(4), dim=0), "repeat_interleave"),
    "classes": (lambda x: F.one_hot(x.abs().long()), "one_hot"),
}


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("name", REFUSED)
def test_record_refuses_what_needs_the_host_and_records_again_after(name):
    refused, said = REFUSED[name]
    x, recorder = random(4, 4), TapeRecorder()
    refused(x)  # outside of a recording nothing is refused
    with pytest.raises(RecordingError, match=rf"({said}).* is not permitted while recording"):
        recorder.record(lambda: refused(x * 1))
    recording = record(lambda: x.mul_(0), recorder)
    recording.replay()
    assert recording.num_nodes == 1


def test_record_fails_though_the_work_swallows_the_refusal():
    def work():
        with suppress(RecordingError):
            torch.ones(3).sum().item()

    with pytest.raises(RecordingError, match="needs the host"):
        TapeRecorder().record(work)


def test_record_allows_index_tensors_and_fixed_sizes():
    x, out = random(4, 4), torch.zeros(4, 4)

    def work():
        hot = F.one_hot(torch.tensor([1, 0, 3, 2]), 4)
        out.copy_(x[torch.tensor([3, 2, 1, 0])] * hot)

    assert record(work).num_nodes > 0


def test_nodes_count_what_runs_and_not_views_or_empty_memory():
    x, out = random(4, 4), torch.zeros(2, 8)

    def work():
        buffer = torch.empty(4, 4)
        torch.mul(x, 2, out=buffer)
        out.copy_(buffer.view(2, 8).narrow(0, 0, 2).detach())

    assert record(work).nodes == {"kernel": 2}
    empty = record(
        lambda: x.t().view(16) if x.is_contiguous(memory_format=torch.channels_last) else x.view(16)
    )
    assert (empty.num_nodes, empty.pool_bytes) == (0, 0)


def work_on_threads(recorder, *works, enters=True):
    """Runs each work on a thread of its own, one after the other."""

    def run(index, work):
        with recorder.enter(index) if enters else torch.inference_mode():
            work()

    for index, work in enumerate(works):
        thread = threading.Thread(target=run, args=(index, work))
        thread.start()
        thread.join()


def test_threads_that_enter_write_to_one_tape_in_their_order():
    recorder = TapeRecorder(poison_dead=True)
    x, out = torch.ones(4), torch.zeros(4)
    shared = {}

    def first():
        shared["doubled"] = x * 2

    def second():
        out.copy_(shared.pop("doubled") + 1)

    recording = record(lambda: work_on_threads(recorder, first, second), recorder)
    assert recording.num_nodes == 3
    x.fill_(5)
    recording.replay()
    assert out.tolist() == [11.0] * 4


def test_threads_take_turns_in_the_middle_of_their_work():
    recorder = TapeRecorder()
    x, out = torch.ones(2, 4), torch.zeros(2, 4)
    order, turns = [], [threading.Event() for _ in range(4)]

    def part(index):
        with recorder.enter(index):
            for step in range(2):
                turns[2 * step + index].wait(10)
                order.append(index)
                x[index].mul_(2)
                out.add_(x)
                if 2 * step + index < 3:
                    turns[2 * step + index + 1].set()

    def work():
        threads = [threading.Thread(target=part, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        turns[0].set()
        for thread in threads:
            thread.join()

    recording = record(work, recorder)
    assert order == [0, 1, 0, 1]
    x.fill_(1)
    out.zero_()
    recording.replay()
    assert out.tolist() == [[12.0] * 4, [9.0] * 4]


def test_work_of_a_thread_that_does_not_enter_is_not_recorded():
    recorder, x = TapeRecorder(), torch.zeros(4)
    recording = record(lambda: work_on_threads(recorder, lambda: x.add_(1), enters=False), recorder)
    assert x.tolist() == [1.0] * 4
    assert recording.num_nodes == 0


def test_enter_outside_of_a_recording_only_enters_inference_mode():
    recorder, seen = TapeRecorder(), []
    work_on_threads(recorder, lambda: seen.append(torch.is_inference_mode_enabled()))
    assert seen == [True]


def chain(x, out, length=12):
    def work():
        y = x
        for _ in range(length):
            y = F.silu(y) + 1
        out.copy_(y)

    return work


def test_recordings_share_the_arena_that_the_largest_made():
    recorder = TapeRecorder()
    x, out = torch.zeros(64, 256), torch.zeros(64, 256)
    row_bytes = 256 * 4
    largest = record(chain(x, out), recorder)
    assert largest.pool_bytes == recorder.arena.num_bytes
    assert largest.pool_bytes <= 3 * 64 * row_bytes  # 24 intermediates one by one take 24
    smaller = [record(chain(x[:n], out[:n]), recorder) for n in (64, 32, 1)]
    assert [recording.pool_bytes for recording in smaller] == [0, 0, 0]
    x.copy_(random(64, 256))
    for count, recording in ((1, smaller[2]), (64, largest), (32, smaller[1])):
        out.zero_()
        recording.replay()
        expected = torch.zeros_like(out)
        chain(x[:count], expected[:count])()
        assert torch.equal(out, expected)


def test_a_larger_recording_grows_the_arena_and_earlier_ones_still_replay():
    recorder = TapeRecorder()
    x, out = random(64, 256), torch.zeros(64, 256)
    small = record(chain(x[:2], out[:2]), recorder)
    before = recorder.arena.num_bytes
    large = record(chain(x, out), recorder)
    assert large.pool_bytes == recorder.arena.num_bytes - before > 0
    out.zero_()
    small.replay()
    expected = torch.zeros_like(out)
    chain(x[:2], expected[:2])()
    assert torch.equal(out, expected)


@torch.library.custom_op("cgprof_tests::remember", mutates_args=())
def remember(x: torch.Tensor) -> torch.Tensor:
    """Keeps a raw address [1] past the life of the tensor, as a broken kernel would."""
    return torch.tensor([x.data_ptr()])


@torch.library.custom_op("cgprof_tests::recall", mutates_args=())
def recall(address: torch.Tensor) -> torch.Tensor:
    import ctypes

    return torch.tensor(list((ctypes.c_float * 4).from_address(int(address))))


@pytest.mark.parametrize("poison", [False, True])
def test_poison_dead_catches_a_read_through_a_stale_address(poison):
    recorder = TapeRecorder(poison_dead=poison)
    x, out, addresses = torch.ones(4), torch.zeros(4), torch.zeros(1, dtype=torch.int64)

    def work():
        addresses.copy_(remember(x * 3))
        out.copy_(recall(addresses))

    # The first run reads memory that may have been given back: it stays out of the comparison.
    recording = record(work, recorder)
    recording.replay()
    assert torch.isnan(out).all().item() is poison
    if not poison:
        assert out.tolist() == [3.0] * 4


def test_record_leaves_earlier_recordings_alone_when_the_third_of_eight_raises():
    recorder = TapeRecorder(poison_dead=True)
    x, out = random(8, 16), torch.zeros(8, 16)
    recordings = {}

    def work(index):
        y = x[: index + 1].exp()
        if index == 2:
            raise ValueError("planted")
        out[: index + 1] = y.log() * index

    for index in range(8):
        if index == 2:
            with pytest.raises(ValueError, match="planted"):
                recorder.record(lambda: work(2))
        else:
            recordings[index] = record(lambda index=index: work(index), recorder)
    for index, recording in recordings.items():
        out.zero_()
        recording.replay()
        assert torch.equal(out[: index + 1], x[: index + 1].exp().log() * index)


def test_record_refuses_a_second_recording_inside_the_first():
    recorder, x = TapeRecorder(), torch.zeros(1)
    with pytest.raises(RecordingError, match="another recording is on"):
        recorder.record(lambda: recorder.record(lambda: x.add_(1)))
    assert record(lambda: x.add_(1), recorder).num_nodes == 1


def test_a_recording_replays_only_between_instantiate_and_free():
    x = torch.zeros(1)
    recording = TapeRecorder().record(lambda: x.add_(1))
    with pytest.raises(RecordingError, match="never instantiated"):
        recording.replay()
    recording.instantiate()
    recording.replay()
    recording.free()
    with pytest.raises(RecordingError, match="freed"):
        recording.replay()
    assert x.item() == 2


def test_warm_up_runs_the_work_and_records_nothing():
    recorder, x = TapeRecorder(), torch.zeros(1)
    recorder.warm_up(lambda: x.add_(1).item())
    assert x.item() == 1


@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor.* is deprecated:FutureWarning")
def test_collectives_run_and_are_waited_for_at_each_replay():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        # Large, so that a replay that does not wait reads before the transfer is done.
        size = 1 << 22
        x, out = torch.ones(size), torch.zeros(size)

        def work():
            sent, received, gathered = x * 2, torch.zeros(size), torch.zeros(size)
            dist.all_to_all_single(received, sent)
            dist.all_reduce(received)
            dist.all_gather_into_tensor(gathered, received)
            out.copy_(gathered + 1)

        recording = record(work)
        x.fill_(4)
        out.zero_()
        recording.replay()
        assert torch.equal(out, torch.full_like(out, 9))
    finally:
        dist.destroy_process_group()
