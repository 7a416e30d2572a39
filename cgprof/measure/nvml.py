"""What NVML says of devices: the only module that speaks to it, through a small interface.

Devices are matched by UUID, never by index: NVML ignores CUDA_VISIBLE_DEVICES and the device order.
A field that a device does not have is None with a reason; any other failure is an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NewType, Protocol, TypeVar

import torch

from cgprof.errors import DeviceError
from cgprof.measure.neighbours import ProcessView, process_view, slowdowns, unknown_view
from cgprof.record.place import Device

Handle = NewType("Handle", object)
T = TypeVar("T")

_UUID_PREFIXES = ("GPU-", "MIG-")
_NO_DRIVER = (
    "; without an NVIDIA driver, capture, check and generate run on the CPU with --device cpu"
)


class FieldUnavailableError(Exception):
    """The device does not have this field; callers turn it into None and a reason."""


class DeviceNotFoundError(Exception):
    """No device has this UUID."""


class UnknownDeviceError(DeviceError):
    """NVML works and knows no device of the UUID that CUDA reports, as in some containers."""


class Nvml(Protocol):
    """The NVML calls that are used. Each raises `FieldUnavailableError` or DeviceError."""

    def driver(self) -> str:
        """Returns the driver's version."""

    def handles(self) -> Sequence[Handle]:
        """Returns all devices, in NVML's order."""

    def handle_by_uuid(self, uuid: str) -> Handle:
        """Returns a device by its full UUID, or raises DeviceNotFoundError."""

    def name(self, handle: Handle) -> str:
        """Returns the product name."""

    def uuid(self, handle: Handle) -> str:
        """Returns the UUID with its prefix."""

    def total_bytes(self, handle: Handle) -> int:
        """Returns the device's memory."""

    def compute_capability(self, handle: Handle) -> str:
        """Returns major.minor."""

    def slowdown_bits(self, handle: Handle) -> int:
        """Returns the clock event reasons that hold now."""

    def power_milliwatts(self, handle: Handle) -> int:
        """Returns the power that the device draws now."""

    def sm_clock_mhz(self, handle: Handle) -> int:
        """Returns the clock of the multiprocessors now."""

    def processes(self, handle: Handle) -> Sequence[tuple[int, int | None]]:
        """Returns (process id, used bytes or None) of the compute processes that NVML sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaDevice:
    """One device as CUDA numbers it in this process."""

    index: int
    name: str
    uuid: str  # without prefix
    total_bytes: int
    compute_capability: str


class NvmlDevice:
    """One device that is in use, found by its CUDA UUID."""

    def __init__(self, nvml: Nvml, cuda_uuid: str) -> None:
        """Finds the device.

        Raises:
            UnknownDeviceError: NVML knows no device of that UUID.
            DeviceError: A call failed.
        """
        self._nvml = nvml
        self._handle = find_handle(nvml, cuda_uuid)

    def processes(self, pid: int) -> ProcessView:
        """Returns the memory of process `pid` and of its neighbours, as far as both are visible."""
        try:
            return process_view(self._nvml.processes(self._handle), pid)
        except FieldUnavailableError as error:
            return unknown_view(f"no process list, {error}")

    def slowdowns(self) -> tuple[str, ...]:
        """Returns why the clocks are held back right now; empty also where NVML cannot tell."""
        try:
            return slowdowns(self._nvml.slowdown_bits(self._handle))
        except FieldUnavailableError:
            return ()


def list_devices(
    nvml: Nvml | None = None,
    cuda: Sequence[CudaDevice] | None = None,
    visible: str | None = None,
) -> tuple[Device, ...]:
    """Returns the devices that this process can use, in CUDA's order.

    Where torch has no CUDA at all, NVML's devices in NVML's order, with a note. The arguments
    default to this machine's NVML, torch's devices and CUDA_VISIBLE_DEVICES.

    Raises:
        DeviceError: No NVML, no device, or CUDA_VISIBLE_DEVICES leaves none.
    """
    nvml = Pynvml() if nvml is None else nvml
    cuda = cuda_devices() if cuda is None else cuda
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
    if cuda:
        return tuple(describe(nvml, device) for device in cuda)
    handles = nvml.handles()
    if not handles:
        raise DeviceError("NVML lists no GPU on this machine")
    if visible is not None:
        raise DeviceError(
            f"no visible GPU: CUDA_VISIBLE_DEVICES={visible!r} selects none of the "
            f"{len(handles)} devices of this machine"
        )
    return tuple(_describe_handle(nvml, handle, index) for index, handle in enumerate(handles))


def describe(nvml: Nvml, device: CudaDevice) -> Device:
    """Returns one device by both views; CUDA's memory size stands in where NVML has none.

    Raises:
        DeviceError: NVML knows no such device, or a call failed.
    """
    handle = find_handle(nvml, device.uuid)
    notes: list[str] = []
    total = _field(notes, "memory", lambda: nvml.total_bytes(handle))
    if total is None:
        notes.append("total memory is CUDA's")
    return Device(
        index=device.index,
        name=_field(notes, "name", lambda: nvml.name(handle)) or device.name,
        uuid=_field(notes, "uuid", lambda: nvml.uuid(handle)),
        total_bytes=device.total_bytes if total is None else total,
        compute_capability=device.compute_capability,
        driver=_field(notes, "driver", nvml.driver),
        power_milliwatts=_field(notes, "power", lambda: nvml.power_milliwatts(handle)),
        sm_clock_mhz=_field(notes, "clock", lambda: nvml.sm_clock_mhz(handle)),
        note="; ".join(notes) or None,
    )


def find_handle(nvml: Nvml, cuda_uuid: str) -> Handle:
    """Returns NVML's handle of a device or MIG slice by the UUID that CUDA gives.

    Raises:
        UnknownDeviceError: NVML knows no device of that UUID.
        DeviceError: A call failed.
    """
    for prefix in _UUID_PREFIXES:
        try:
            return nvml.handle_by_uuid(prefix + cuda_uuid)
        except DeviceNotFoundError:
            continue
    raise UnknownDeviceError(f"NVML knows no device with the UUID {cuda_uuid} that CUDA reports")


def cuda_devices() -> tuple[CudaDevice, ...]:
    """Returns the devices that torch sees, in its order; empty without CUDA."""
    if not torch.cuda.is_available():
        return ()
    return tuple(cuda_device(index) for index in range(torch.cuda.device_count()))


def cuda_device(index: int) -> CudaDevice:
    """Returns one device as torch sees it."""
    properties = torch.cuda.get_device_properties(index)
    return CudaDevice(
        index=index,
        name=properties.name,
        uuid=str(properties.uuid),
        total_bytes=properties.total_memory,
        compute_capability=f"{properties.major}.{properties.minor}",
    )


def _describe_handle(nvml: Nvml, handle: Handle, index: int) -> Device:
    notes = ["index is NVML's: torch has no CUDA here"]
    return Device(
        index=index,
        name=_field(notes, "name", lambda: nvml.name(handle)) or "unknown",
        uuid=_field(notes, "uuid", lambda: nvml.uuid(handle)),
        total_bytes=_field(notes, "memory", lambda: nvml.total_bytes(handle)),
        compute_capability=_field(
            notes, "compute capability", lambda: nvml.compute_capability(handle)
        ),
        driver=_field(notes, "driver", nvml.driver),
        power_milliwatts=_field(notes, "power", lambda: nvml.power_milliwatts(handle)),
        sm_clock_mhz=_field(notes, "clock", lambda: nvml.sm_clock_mhz(handle)),
        note="; ".join(notes),
    )


def _field(notes: list[str], name: str, read: Callable[[], T]) -> T | None:
    """Returns a field, or None and a note where the device does not have it."""
    try:
        return read()
    except FieldUnavailableError as error:
        notes.append(f"{name} not available from NVML: {error}")
        return None


class Pynvml:
    """NVML through nvidia-ml-py, which is imported here and nowhere else."""

    def __init__(self) -> None:
        """Loads the library and starts it.

        Raises:
            DeviceError: No NVML library or no driver.
        """
        import pynvml

        self._lib = pynvml
        self._call(pynvml.nvmlInit)

    def driver(self) -> str:
        """Returns the driver's version."""
        return str(self._call(self._lib.nvmlSystemGetDriverVersion))

    def handles(self) -> Sequence[Handle]:
        """Returns all devices, in NVML's order."""
        count = int(self._call(self._lib.nvmlDeviceGetCount))
        return [Handle(self._call(self._lib.nvmlDeviceGetHandleByIndex, i)) for i in range(count)]

    def handle_by_uuid(self, uuid: str) -> Handle:
        """Returns a device by its full UUID, or raises DeviceNotFoundError."""
        return Handle(self._call(self._lib.nvmlDeviceGetHandleByUUID, uuid))

    def name(self, handle: Handle) -> str:
        """Returns the product name."""
        return str(self._call(self._lib.nvmlDeviceGetName, handle))

    def uuid(self, handle: Handle) -> str:
        """Returns the UUID with its prefix."""
        return str(self._call(self._lib.nvmlDeviceGetUUID, handle))

    def total_bytes(self, handle: Handle) -> int:
        """Returns the device's memory."""
        return int(self._call(self._lib.nvmlDeviceGetMemoryInfo, handle).total)

    def compute_capability(self, handle: Handle) -> str:
        """Returns major.minor."""
        major, minor = self._call(self._lib.nvmlDeviceGetCudaComputeCapability, handle)
        return f"{major}.{minor}"

    def slowdown_bits(self, handle: Handle) -> int:
        """Returns the clock event reasons that hold now."""
        return int(self._call(self._lib.nvmlDeviceGetCurrentClocksEventReasons, handle))

    def power_milliwatts(self, handle: Handle) -> int:
        """Returns the power that the device draws now."""
        return int(self._call(self._lib.nvmlDeviceGetPowerUsage, handle))

    def sm_clock_mhz(self, handle: Handle) -> int:
        """Returns the clock of the multiprocessors now."""
        return int(self._call(self._lib.nvmlDeviceGetClockInfo, handle, self._lib.NVML_CLOCK_SM))

    def processes(self, handle: Handle) -> Sequence[tuple[int, int | None]]:
        """Returns (process id, used bytes or None) of the compute processes that NVML sees."""
        listed = self._call(self._lib.nvmlDeviceGetComputeRunningProcesses, handle)
        return [(process.pid, process.usedGpuMemory) for process in listed]

    def _call(self, function: Callable[..., T], *arguments: object) -> T:
        lib = self._lib
        try:
            return function(*arguments)
        except lib.NVMLError as error:
            if error.value in (lib.NVML_ERROR_NOT_SUPPORTED, lib.NVML_ERROR_FUNCTION_NOT_FOUND):
                raise FieldUnavailableError(str(error)) from error
            if function is lib.nvmlDeviceGetHandleByUUID and error.value in (
                lib.NVML_ERROR_NOT_FOUND,
                lib.NVML_ERROR_INVALID_ARGUMENT,
            ):
                raise DeviceNotFoundError(str(error)) from error
            hint = _NO_DRIVER if function is lib.nvmlInit else ""
            raise DeviceError(f"NVML: {function.__name__}: {error}{hint}") from error
