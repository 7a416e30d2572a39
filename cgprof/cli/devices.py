"""`cgprof devices`: the devices that a run could use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from cgprof.cli import options
from cgprof.cli.options import OutputFormat
from cgprof.errors import DeviceError

if TYPE_CHECKING:
    from cgprof.record.types import Device

_HEADER = ("index", "name", "memory", "compute", "driver", "uuid", "note")


def devices(output_format: options.Format = OutputFormat.TEXT) -> None:
    """List the devices that are visible to this process."""
    from cgprof.measure.nvml import list_devices

    found = list_devices()
    if not found:
        raise DeviceError(
            "no NVIDIA device is visible to this process; check the driver and "
            "CUDA_VISIBLE_DEVICES; capture, check and generate run on the CPU with "
            "--device cpu"
        )
    if output_format is OutputFormat.JSON:
        typer.echo(json.dumps([device.model_dump(mode="json") for device in found], indent=2))
    else:
        typer.echo(devices_table(found))


def devices_table(found: Sequence[Device]) -> str:
    """Returns one aligned line a device; columns that are empty for all are left out."""
    from cgprof.units import format_gib

    rows = [
        (
            str(device.index),
            device.name,
            format_gib(device.total_bytes),
            device.compute_capability or "",
            device.driver or "",
            device.uuid or "",
            device.note or "",
        )
        for device in found
    ]
    columns = [(title, *cells) for title, *cells in zip(_HEADER, *rows, strict=True) if any(cells)]
    widths = [max(map(len, column)) for column in columns]
    lines = zip(*columns, strict=True)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
