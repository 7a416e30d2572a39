import numpy as np
import pytest
import torch

from cgprof.staging.pinned import StagingPool

CPU_AND_GPU = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def test_slots_are_distinct_and_come_in_turn():
    pool = StagingPool(64, torch.device("cpu"), depth=3)
    slots = []
    for value in range(3):
        index, raw = pool.acquire()
        raw[:] = value
        slots.append((index, raw))
    assert [index for index, _ in slots] == [0, 1, 2]
    assert [set(raw.tolist()) for _, raw in slots] == [{0}, {1}, {2}]
    assert pool.acquire()[0] == 0


def test_slot_keeps_what_an_earlier_step_left():
    pool = StagingPool(8, torch.device("cpu"), depth=2)
    pool.acquire()[1][:] = 7
    pool.acquire()
    assert pool.acquire()[1].tolist() == [7] * 8


@pytest.mark.parametrize("device", CPU_AND_GPU)
def test_upload_writes_the_prefix_only(device):
    pool = StagingPool(16, torch.device(device))
    target = torch.full((16,), 9, dtype=torch.uint8, device=device)
    index, raw = pool.acquire()
    raw[:] = np.arange(16)
    pool.upload(index, 5, target)
    assert target.tolist() == [0, 1, 2, 3, 4] + [9] * 11


@pytest.mark.gpu
def test_slot_is_handed_out_only_after_the_device_has_read_it():
    size = 1 << 22
    pool = StagingPool(size, torch.device("cuda"), depth=2)
    target = torch.zeros(size, dtype=torch.uint8, device="cuda")
    copies = []
    for step in range(32):
        index, raw = pool.acquire()
        raw[:] = step
        pool.upload(index, size, target)
        copies.append(target.clone())
    assert [sorted(set(copy.tolist())) for copy in copies[-2:]] == [[30], [31]]
    assert all(bool((copy == step).all()) for step, copy in enumerate(copies))
