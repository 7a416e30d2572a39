import mmap
import threading

import pytest
import torch

from cgprof.measure.memory import used_bytes
from cgprof.measure.sampler import sampling


def test_without_a_period_nothing_is_read():
    with sampling(lambda: pytest.fail("read"), None) as peak:
        assert not [t for t in threading.enumerate() if t.name == "memory sampler"]
    assert (peak.count, peak.most_bytes) == (0, None)


def test_peak_between_is_kept_and_the_thread_is_gone():
    values, seen = iter([5, 9, 7]), threading.Event()

    def read():
        value = next(values, 6)
        if value == 6:
            seen.set()
        return value

    with sampling(read, 1.0) as peak:
        assert seen.wait(20)
    assert peak.most_bytes == 9
    assert peak.count >= 4
    assert not [t for t in threading.enumerate() if t.name == "memory sampler"]


def test_short_block_has_at_least_one_reading():
    with sampling(lambda: 3, 60_000.0) as peak:
        pass
    assert (peak.count, peak.most_bytes) == (1, 3)


def test_failed_reading_is_raised_after_the_block_and_what_the_block_raises_goes_first():
    def fail():
        raise RuntimeError("GPU is lost")

    done = []
    with pytest.raises(RuntimeError, match="GPU is lost"), sampling(fail, 1.0):
        done.append(1)
    assert done
    with pytest.raises(ValueError, match="planted"), sampling(fail, 1.0):
        raise ValueError("planted")
    assert not [t for t in threading.enumerate() if t.name == "memory sampler"]


def test_used_bytes_of_the_host_grow_with_what_is_held():
    before = used_bytes(torch.device("cpu"))
    with mmap.mmap(-1, 64 << 20) as held:  # fresh pages: an allocator may have some left over
        held.write(bytes(64 << 20))
        assert used_bytes(torch.device("cpu")) - before >= 48 << 20


@pytest.mark.gpu
def test_used_bytes_of_a_device_grow_with_what_is_held():
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    before = used_bytes(device)
    held = torch.ones(256 << 20, dtype=torch.uint8, device=device)
    assert used_bytes(device) - before >= 240 << 20
    del held
