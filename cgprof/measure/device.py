"""The device that a run uses, as a record and as NVML's handle; without NVML, as torch sees it."""

from __future__ import annotations

import torch

from cgprof.errors import DeviceError
from cgprof.measure.nvml import NvmlDevice, Pynvml, cuda_device, describe
from cgprof.record.types import Device


def current_device(device: torch.device) -> tuple[Device | None, NvmlDevice | None, str | None]:
    """Returns the record, the NVML handle, and why there is none; (None, None, None) on the CPU."""
    if device.type != "cuda" or device.index is None:
        return None, None, None
    seen = cuda_device(device.index)
    try:
        nvml = Pynvml()
        return describe(nvml, seen), NvmlDevice(nvml, seen.uuid), None
    except DeviceError as error:
        record = Device(
            index=seen.index,
            name=seen.name,
            uuid=seen.uuid,
            total_bytes=seen.total_bytes,
            compute_capability=seen.compute_capability,
            note=f"NVML was not read: {error}",
        )
        return record, None, record.note
