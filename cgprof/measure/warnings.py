"""What makes a measurement doubtful, as values; each carries its text for the record."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from cgprof.measure.accounting import DeviceReading, neighbour_moved
from cgprof.record.graph import GraphMemory, StageStats
from cgprof.units import format_bytes, format_ns

_DEAR_FIRST_REPLAY = 10  # times the median of the later ones


class WarningKind(StrEnum):
    """Why a figure should be read with care."""

    NOISY = "noisy"
    FIRST_REPLAY_DEAR = "first-replay-dear"
    DEVICE_BOUND = "device-bound"
    THROTTLED = "throttled"
    NEIGHBOUR_MOVED = "neighbour-moved"
    NEGATIVE_REST = "negative-rest"
    NO_DEVICE_GROWTH = "no-device-growth"


_OF_CAPTURE = (
    WarningKind.NEIGHBOUR_MOVED,
    WarningKind.NEGATIVE_REST,
    WarningKind.NO_DEVICE_GROWTH,
)


@dataclass(frozen=True, slots=True)
class MeasureWarning:
    """One warning; its text says what was seen."""

    kind: WarningKind
    detail: str

    def __str__(self) -> str:
        """The kind, then what was seen."""
        return f"{self.kind.value}: {self.detail}"


def bound_by(eager: StageStats, replay: StageStats) -> Literal["host", "device"] | None:
    """Returns what an eager step waits for: its own launching or the device; None without one.

    A graph shortens a step that is bound by the host. Both times are of an idle queue.
    """
    if replay.device is None:
        return None
    return "device" if replay.device.median_ns >= eager.launch.median_ns else "host"


def launch_warnings(
    eager: StageStats, replay: StageStats, first_replay_ns: int, wanted_noise: float
) -> list[MeasureWarning]:
    """Returns what is doubtful in the launch times of one key."""
    found = []
    for name, stats in (("eager", eager.launch), ("replay", replay.launch)):
        if stats.noise is None:
            detail = f"{name}: {stats.count} samples are too few to tell the noise"
            found.append(MeasureWarning(WarningKind.NOISY, detail))
        elif stats.noise >= wanted_noise:
            detail = (
                f"{name}: quartiles {stats.noise:.0%} of the median apart after {stats.count} "
                f"samples, {wanted_noise:.0%} wanted (stopped by {stats.stopped_by})"
            )
            found.append(MeasureWarning(WarningKind.NOISY, detail))
    median_ns = replay.launch.median_ns
    if first_replay_ns > _DEAR_FIRST_REPLAY * median_ns:
        detail = f"first launch {format_ns(first_replay_ns)}, later ones {format_ns(median_ns)}"
        found.append(MeasureWarning(WarningKind.FIRST_REPLAY_DEAR, detail))
    if replay.device is not None and bound_by(eager, replay) == "device":
        detail = (
            f"the device works {format_ns(replay.device.median_ns)}, eager launching takes "
            f"{format_ns(eager.launch.median_ns)}: a graph saves host time, not step time"
        )
        found.append(MeasureWarning(WarningKind.DEVICE_BOUND, detail))
    return found


def throttle_warnings(slowdowns: tuple[str, ...]) -> list[MeasureWarning]:
    """Returns one warning if the clocks were held back while samples were taken."""
    if not slowdowns:
        return []
    return [MeasureWarning(WarningKind.THROTTLED, ", ".join(slowdowns))]


def timing_warnings(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Returns those warnings of a key that doubt its times; the others doubt its memory."""
    return tuple(text for text in texts if text.partition(":")[0] not in _OF_CAPTURE)


def memory_warnings(
    memory: GraphMemory, before: DeviceReading, after: DeviceReading
) -> list[MeasureWarning]:
    """Returns what is doubtful in the memory figures of one key."""
    found = []
    moved = neighbour_moved(before, after)
    if moved is not None:
        detail = f"device memory is not this process's alone: {moved}"
        found.append(MeasureWarning(WarningKind.NEIGHBOUR_MOVED, detail))
    if memory.rest_bytes is not None and memory.rest_bytes < 0:
        detail = (
            f"{format_bytes(-memory.rest_bytes)} less was taken from the device than the parts "
            "hold: memory was released meanwhile"
        )
        found.append(MeasureWarning(WarningKind.NEGATIVE_REST, detail))
    if after.free_bytes > before.free_bytes:
        detail = (
            f"{format_bytes(after.free_bytes - before.free_bytes)} were released during the "
            "capture; the device delta is no usage"
        )
        found.append(MeasureWarning(WarningKind.NO_DEVICE_GROWTH, detail))
    return found
