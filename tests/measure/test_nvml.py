import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from cgprof.cli.app import app
from cgprof.errors import DeviceError
from cgprof.measure.nvml import (
    NvmlDevice,
    Pynvml,
    cuda_device,
    cuda_devices,
    describe,
    list_devices,
)
from tests.support.fake_nvml import GIB, FakeGpu, FakeNvml, cuda_view, unsupported

ZERO, ONE = FakeGpu(0, name="zero"), FakeGpu(1, name="one")


@pytest.mark.parametrize(
    ("variable", "selected"),
    [
        ("1", [ONE]),
        (f"GPU-{ONE.cuda_uuid}", [ONE]),
        ("GPU-00000001", [ONE]),
        ("1, 0", [ONE, ZERO]),
    ],
)
def test_list_devices_follows_cuda_by_uuid(variable, selected):
    cuda = [cuda_view(gpu, index) for index, gpu in enumerate(selected)]
    found = list_devices(FakeNvml([ZERO, ONE]), cuda, variable)
    assert [device.uuid for device in found] == [f"GPU-{gpu.cuda_uuid}" for gpu in selected]
    assert [device.name for device in found] == [gpu.name for gpu in selected]
    assert [device.index for device in found] == list(range(len(selected)))


@pytest.mark.parametrize("variable", ["", "7"])
def test_list_devices_says_that_the_variable_leaves_none(variable):
    with pytest.raises(DeviceError, match=f"CUDA_VISIBLE_DEVICES='{variable}'"):
        list_devices(FakeNvml([ZERO, ONE]), [], variable)


def test_list_devices_without_cuda_notes_that_indices_are_nvmls(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = list_devices(FakeNvml([ZERO, FakeGpu(1, capability=unsupported())]), [])
    assert [device.index for device in found] == [0, 1]
    assert found[0].note == "index is NVML's: torch has no CUDA here"
    assert found[1].compute_capability is None
    assert "compute capability not available from NVML: Not Supported" in found[1].note


def test_list_devices_without_a_gpu_is_an_error():
    with pytest.raises(DeviceError, match="NVML lists no GPU"):
        list_devices(FakeNvml([]), [])


def test_describe_takes_memory_from_cuda_only_where_nvml_has_none():
    shared = FakeGpu(0, total=unsupported())
    device = describe(FakeNvml([shared]), cuda_view(shared, 0))
    assert device.total_bytes == 79 * GIB
    assert device.note == ("memory not available from NVML: Not Supported; total memory is CUDA's")
    assert (device.name, device.driver) == (shared.name, "580.1")
    assert describe(FakeNvml([ZERO]), cuda_view(ZERO, 0)).total_bytes == 80 * GIB


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees devices here")
@pytest.mark.parametrize("variable", ["", "7"])
def test_devices_command_without_a_visible_gpu_is_one_line_and_not_zero(monkeypatch, variable):
    monkeypatch.setattr("cgprof.measure.nvml.Pynvml", lambda: FakeNvml([ZERO, ONE]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    result = CliRunner().invoke(app, ["devices"])
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr == (
        f"error: no visible GPU: CUDA_VISIBLE_DEVICES={variable!r} selects none of the 2 devices "
        "of this machine\n"
    )


@pytest.mark.gpu
def test_short_uuid_selects_the_device_that_is_reported():
    uuid = cuda_device(torch.cuda.current_device()).uuid
    done = subprocess.run(
        [sys.executable, "-m", "cgprof", "devices", "--format", "json"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": f"GPU-{uuid[:8]}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f'"GPU-{uuid}"' in done.stdout


def test_describe_passes_other_failures_on():
    lost = FakeGpu(0, total=DeviceError("NVML: nvmlDeviceGetMemoryInfo: GPU is lost"))
    with pytest.raises(DeviceError, match="GPU is lost"):
        describe(FakeNvml([lost]), cuda_view(lost, 0))


def test_nvml_device_finds_a_mig_slice_and_refuses_an_unknown_one():
    piece = FakeGpu(3, uuid_prefix="MIG-", processes=((7, 100),))
    assert NvmlDevice(FakeNvml([piece]), piece.cuda_uuid).processes(7).own_bytes == 100
    with pytest.raises(DeviceError, match="knows no device"):
        NvmlDevice(FakeNvml([piece]), ONE.cuda_uuid)


def test_nvml_device_sees_itself_and_its_neighbours():
    gpu = FakeGpu(0, processes=((30, 5), (7, 100), (20, 6)))
    view = NvmlDevice(FakeNvml([gpu]), gpu.cuda_uuid).processes(7)
    assert (view.own_bytes, view.neighbour_pids, view.neighbour_bytes) == (100, (20, 30), 11)
    assert view.note is None


@pytest.mark.parametrize("listed", [(), ((501, 10), (502, 20)), unsupported()])
def test_nvml_device_in_a_container_knows_nothing_rather_than_none(listed):
    gpu = FakeGpu(0, processes=listed)
    view = NvmlDevice(FakeNvml([gpu]), gpu.cuda_uuid).processes(7)
    assert (view.own_bytes, view.neighbour_pids, view.neighbour_bytes) == (None, None, None)
    assert view.note.startswith("per-process view not available here")


@pytest.mark.parametrize(
    ("listed", "own", "neighbours"),
    [(((7, None),), None, 0), (((7, 100), (8, None)), 100, None)],
)
def test_nvml_device_keeps_an_unknown_size_unknown(listed, own, neighbours):
    gpu = FakeGpu(0, processes=listed)
    view = NvmlDevice(FakeNvml([gpu]), gpu.cuda_uuid).processes(7)
    assert (view.own_bytes, view.neighbour_bytes) == (own, neighbours)
    assert view.neighbour_pids is not None
    assert view.note is not None


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0x01 | 0x04, ()),  # idle, and a power cap that someone chose
        (0x08 | 0x40, ("hardware slowdown", "hardware thermal slowdown")),
        (unsupported(), ()),
    ],
)
def test_nvml_device_names_why_clocks_are_held_back(bits, expected):
    gpu = FakeGpu(0, slowdown_bits=bits)
    assert NvmlDevice(FakeNvml([gpu]), gpu.cuda_uuid).slowdowns() == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a driver")
def test_pynvml_without_a_driver_is_one_line_with_the_way_out():
    with pytest.raises(DeviceError, match="--device cpu") as caught:
        Pynvml()
    assert "\n" not in str(caught.value)


@pytest.mark.gpu
def test_pynvml_and_torch_mean_the_same_device():
    found = list_devices()
    assert len(found) == torch.cuda.device_count()
    for device, cuda in zip(found, cuda_devices(), strict=True):
        assert device.uuid == f"GPU-{cuda.uuid}"
        assert device.name == cuda.name
        assert device.compute_capability == cuda.compute_capability
    here = NvmlDevice(Pynvml(), cuda_device(torch.cuda.current_device()).uuid)
    torch.zeros(1, device="cuda")
    view = here.processes(os.getpid())
    assert view.own_bytes is None or view.own_bytes > 0
    assert all(isinstance(text, str) for text in here.slowdowns())
