"""Who else uses a device, and whether its clocks are held back; the unseen is unknown. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Source: nvml.h, nvmlClocksEventReason*; those that say the hardware is held back.
_SLOWDOWN_BITS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessView:
    """A device's processes at one moment. None is unknown, which differs from none or zero."""

    own_bytes: int | None
    neighbour_pids: tuple[int, ...] | None
    neighbour_bytes: int | None
    note: str | None = None


def process_view(listed: Iterable[tuple[int, int | None]], pid: int) -> ProcessView:
    """Returns the memory of process `pid` and of its neighbours, from (process id, bytes) pairs.

    A list without `pid` comes from another process namespace: its neighbours are unknown then.
    """
    used = dict(listed)
    if pid not in used:
        return unknown_view("this process is not in NVML's list")
    own = used.pop(pid)
    visible = [one for one in used.values() if one is not None]
    all_visible = len(visible) == len(used)
    return ProcessView(
        own_bytes=own,
        neighbour_pids=tuple(sorted(used)),
        neighbour_bytes=sum(visible) if all_visible else None,
        note=None if own is not None and all_visible else _unavailable("NVML tells no sizes"),
    )


def unknown_view(reason: str) -> ProcessView:
    """Returns the view of a device whose processes cannot be seen."""
    return ProcessView(
        own_bytes=None, neighbour_pids=None, neighbour_bytes=None, note=_unavailable(reason)
    )


def slowdowns(clock_event_reasons: int) -> tuple[str, ...]:
    """Returns in words why the clocks are held back; idling and chosen limits do not count."""
    return tuple(text for bit, text in _SLOWDOWN_BITS.items() if clock_event_reasons & bit)


def _unavailable(reason: str) -> str:
    return f"per-process view not available here: {reason}"
