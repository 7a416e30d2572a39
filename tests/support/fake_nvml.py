"""NVML as a table of devices, for machines without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

from cgprof.measure.nvml import CudaDevice, DeviceNotFoundError, FieldUnavailableError

GIB = 1 << 30


@dataclass
class FakeGpu:
    """One device; a field that is an exception is raised instead of returned."""

    number: int
    total: object = 80 * GIB
    name: str = "a GPU"
    processes: object = ()
    slowdown_bits: object = 0
    uuid_prefix: str = "GPU-"
    driver: object = "580.1"
    power: object = 123_000
    clock: object = 1_980
    capability: object = field(default="9.0")

    @property
    def cuda_uuid(self):
        return f"{self.number:08x}-0000-0000-0000-000000000000"


def cuda_view(gpu, index):
    """The device as CUDA would number it."""
    return CudaDevice(
        index=index,
        name=f"cuda {gpu.name}",
        uuid=gpu.cuda_uuid,
        total_bytes=79 * GIB,
        compute_capability="9.0",
    )


def unsupported():
    return FieldUnavailableError("Not Supported")


class FakeNvml:
    """Implements `cgprof.measure.nvml.Nvml` over a list of devices."""

    def __init__(self, gpus):
        self._gpus = list(gpus)

    def driver(self):
        return _value(self._gpus[0].driver)

    def handles(self):
        return self._gpus

    def handle_by_uuid(self, uuid):
        for gpu in self._gpus:
            if uuid == gpu.uuid_prefix + gpu.cuda_uuid:
                return gpu
        raise DeviceNotFoundError(uuid)

    def name(self, handle):
        return handle.name

    def uuid(self, handle):
        return handle.uuid_prefix + handle.cuda_uuid

    def total_bytes(self, handle):
        return _value(handle.total)

    def compute_capability(self, handle):
        return _value(handle.capability)

    def power_milliwatts(self, handle):
        return _value(handle.power)

    def sm_clock_mhz(self, handle):
        return _value(handle.clock)

    def slowdown_bits(self, handle):
        return _value(handle.slowdown_bits)

    def processes(self, handle):
        return _value(handle.processes)


def _value(value):
    if isinstance(value, Exception):
        raise value
    return value
