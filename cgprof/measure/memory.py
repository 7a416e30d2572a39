"""Reads a device's memory once the device has settled. The CPU has no device memory to read."""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from cgprof.measure.accounting import DeviceReading
from cgprof.measure.nvml import NvmlDevice

_GENERAL_POOL = (0, 0)


def used_bytes(device: torch.device) -> int:
    """Returns the device's memory in use now; on the CPU, what this process holds of the host's.

    Safe in any thread while another one records: it neither allocates nor waits.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return resident_pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def many_readings(device: torch.device) -> Iterator[None]:
    """Lets the collections of `MemoryReader.read` look at new objects only, which is quick."""
    if device.type != "cuda":
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class MemoryReader:
    """Reads the allocator, the driver and NVML for one device.

    `streams` names streams by their CUDA handle; a stream without a name shows its handle.
    """

    def __init__(
        self,
        device: torch.device,
        nvml: NvmlDevice | None = None,
        streams: Mapping[int, str] | None = None,
    ) -> None:
        self.nvml = nvml
        self._device = torch.empty(0, device=device).device  # with its index
        self._streams = {0: "default", **(streams or {})}

    def read(self) -> DeviceReading | None:
        """Settles the device and reads all views; None on the CPU.

        Settling collects garbage, waits for the device and gives cached segments back to the
        driver, so that what remains is held by something.
        """
        if self._device.type != "cuda":
            return None
        gc.collect()
        reading = self.read_between()
        if reading is None or self.nvml is None:
            return reading
        return DeviceReading(
            free_bytes=reading.free_bytes,
            pool_by_stream=reading.pool_by_stream,
            general_by_stream=reading.general_by_stream,
            processes=self.nvml.processes(os.getpid()),
        )

    def read_between(self) -> DeviceReading | None:
        """As `read`, but quick enough between the phases of a capture: no garbage, no NVML."""
        if self._device.type != "cuda":
            return None
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        pool, general = self._segments()
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        return DeviceReading(free_bytes=free_bytes, pool_by_stream=pool, general_by_stream=general)

    def _segments(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes of the allocator's segments by stream, graph pools apart from the rest."""
        pool: defaultdict[str, int] = defaultdict(int)
        general: defaultdict[str, int] = defaultdict(int)
        for segment in torch.cuda.memory_snapshot():
            if segment["device"] != self._device.index:
                continue
            stream = self._streams.get(segment["stream"], f"stream {segment['stream']:#x}")
            in_pool = tuple(segment["segment_pool_id"]) != _GENERAL_POOL
            (pool if in_pool else general)[stream] += segment["total_size"]
        return dict(pool), dict(general)
