"""The device that a run uses, as a record and as NVML's handle; without NVML, as torch sees it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cgprof.errors import DeviceError
from cgprof.measure.nvml import (
    CudaDevice,
    Nvml,
    NvmlDevice,
    Pynvml,
    UnknownDeviceError,
    cuda_device,
    describe,
)
from cgprof.record.place import Device


def current_device(device: torch.device) -> tuple[Device | None, NvmlDevice | None, str | None]:
    """Returns the record, the NVML handle, and why there is none; (None, None, None) on the CPU.

    Raises:
        DeviceError: NVML knows the device and fails, as for a GPU that is lost.
    """
    if device.type != "cuda" or device.index is None:
        return None, None, None
    return read_device(cuda_device(device.index), Pynvml)


def read_device(
    seen: CudaDevice, start: Callable[[], Nvml]
) -> tuple[Device, NvmlDevice | None, str | None]:
    """Returns the same for a device as CUDA sees it; `start` starts NVML.

    Raises:
        DeviceError: NVML knows the device and fails.
    """
    try:
        nvml = start()
    except DeviceError as error:
        return _without_nvml(seen, error)
    try:
        handle = NvmlDevice(nvml, seen.uuid)
    except UnknownDeviceError as error:
        return _without_nvml(seen, error)
    return describe(nvml, seen), handle, None


def _without_nvml(seen: CudaDevice, error: DeviceError) -> tuple[Device, None, str]:
    note = f"NVML was not read: {error}"
    record = Device(
        index=seen.index,
        name=seen.name,
        uuid=seen.uuid,
        total_bytes=seen.total_bytes,
        compute_capability=seen.compute_capability,
        note=note,
    )
    return record, None, note
