import itertools
from dataclasses import fields

import numpy as np
import pytest
import torch

from cgprof.batch.buffers import DeviceFields, HostFields, InputBuffers

CPU_AND_GPU = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NAMES = [field.name for field in fields(DeviceFields)]


def make_buffers(device="cpu"):
    return InputBuffers(
        max_num_tokens=37,
        max_num_reqs=5,
        blocks_per_request=3,
        num_microbatches=2,
        device=torch.device(device),
    )


def random_values(array, rng):
    if array.dtype == np.bool_:
        return rng.random(array.shape) < 0.5
    return rng.integers(1, 1000, array.shape).astype(array.dtype)


def write_all(host, seed):
    rng = np.random.default_rng(seed)
    values = {}
    for name in NAMES:
        values[name] = random_values(getattr(host, name), rng)
        getattr(host, name)[...] = values[name]
    return values


def test_fields_have_the_shapes_and_types_of_their_contract():
    host, device = make_buffers().begin(), make_buffers().device_fields
    assert [field.name for field in fields(HostFields)] == NAMES
    shapes = {
        "query_start_loc": ((6,), torch.int32),
        "seq_lens": ((5,), torch.int32),
        "split_query_start_loc": ((2, 6), torch.int32),
        "split_seq_lens": ((2, 5), torch.int32),
        "sample_rows": ((5,), torch.int64),
        "temperature": ((5,), torch.float32),
        "draws": ((5,), torch.float32),
        "input_ids": ((37,), torch.int32),
        "positions": ((37,), torch.int64),
        "slot_mapping": ((37,), torch.int64),
        "is_padding": ((37,), torch.bool),
        "block_table": ((5, 3), torch.int32),
    }
    assert list(shapes) == NAMES
    for name, (shape, dtype) in shapes.items():
        tensor = getattr(device, name)
        assert tensor.shape == shape, name
        assert tensor.dtype == dtype, name
        assert torch.from_numpy(getattr(host, name)).dtype == dtype, name
        assert getattr(host, name).shape == shape, name


@pytest.mark.parametrize("device", CPU_AND_GPU)
def test_device_fields_are_aligned_and_share_no_byte(device):
    view = make_buffers(device).device_fields
    spans = []
    for name in NAMES:
        tensor = getattr(view, name)
        assert tensor.data_ptr() % 64 == 0, name
        assert tensor.is_contiguous(), name
        spans.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_host_fields_share_no_byte():
    host = make_buffers().begin()
    for index, name in enumerate(NAMES):
        getattr(host, name)[...] = index % 2
    for index, name in enumerate(NAMES):
        assert (getattr(host, name) == index % 2).all(), name


@pytest.mark.parametrize("device", CPU_AND_GPU)
def test_commit_uploads_every_field_and_keeps_addresses(device):
    buffers = make_buffers(device)
    before = buffers.addresses()
    assert len(set(before)) == len(NAMES)
    for step in range(9):
        values = write_all(buffers.begin(), step)
        buffers.commit(5)
        for name in NAMES:
            uploaded = getattr(buffers.device_fields, name).cpu().numpy()
            assert (uploaded == values[name]).all(), name
    assert buffers.addresses() == before


@pytest.mark.parametrize("num_rows", [0, 1, 4])
def test_commit_copies_only_the_block_table_rows_in_use(num_rows):
    buffers = make_buffers()
    first = write_all(buffers.begin(), 0)
    buffers.commit(5)
    second = write_all(buffers.begin(), 1)
    buffers.commit(num_rows)
    table = buffers.device_fields.block_table.numpy()
    assert (table[:num_rows] == second["block_table"][:num_rows]).all()
    assert (table[num_rows:] == first["block_table"][num_rows:]).all()
    assert (buffers.device_fields.is_padding.numpy() == second["is_padding"]).all()


def test_slot_opened_later_does_not_touch_the_one_in_flight():
    buffers = make_buffers()
    values = write_all(buffers.begin(), 0)
    buffers.commit(5)
    write_all(buffers.begin(), 1)
    for name in NAMES:
        assert (getattr(buffers.device_fields, name).numpy() == values[name]).all(), name
