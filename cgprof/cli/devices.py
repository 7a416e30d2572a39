"""`cgprof devices`: the devices that a run could use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cgprof.cli import options
from cgprof.errors import DeviceError
from cgprof.report.formats import OutputFormat

if TYPE_CHECKING:
    from cgprof.record.place import Device
    from cgprof.report.layout import Table

_COLUMNS = {
    "index": "index",
    "name": "name",
    "total_bytes": "memory",
    "compute_capability": "compute",
    "driver": "driver",
    "uuid": "uuid",
    "note": "note",
}


def devices(output_format: options.Format = OutputFormat.TEXT) -> None:
    """List the devices that are visible to this process."""
    from cgprof.measure.nvml import list_devices
    from cgprof.report.document import Document

    found = list_devices()
    if not found:
        raise DeviceError(
            "no NVIDIA device is visible to this process; check the driver and "
            "CUDA_VISIBLE_DEVICES; capture, check and generate run on the CPU with "
            "--device cpu"
        )
    table = devices_table(found)
    document = Document(
        blocks=[table],
        tables=[table],
        data=lambda: [device.model_dump(mode="json") for device in found],
    )
    options.emit(document, output_format)


def devices_table(found: Sequence[Device]) -> Table:
    """Returns one row a device; people do not see what is known of none."""
    from cgprof.report.layout import Table

    return Table(
        name="devices",
        columns=_COLUMNS,
        rows=tuple(tuple(getattr(device, name) for name in _COLUMNS) for device in found),
        optional=frozenset(_COLUMNS),
    )
