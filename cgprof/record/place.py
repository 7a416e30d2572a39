"""Records of what ran where: the device, what is installed, the processes of a run."""

from __future__ import annotations

from pydantic import Field

from cgprof.record.strict import NonNegative, Record


class Device(Record):
    """What `measure.nvml` and torch say of one device."""

    index: NonNegative
    name: str
    uuid: str | None = None
    total_bytes: NonNegative | None = None
    compute_capability: str | None = None
    driver: str | None = None
    power_milliwatts: NonNegative | None = None  # when the device was read
    sm_clock_mhz: NonNegative | None = None
    note: str | None = None


class Environment(Record):
    """What ran where."""

    cgprof: str
    python: str
    torch: str
    triton: str | None = None
    cuda: str | None = None
    hostname: str
    platform: str
    cpu: str | None = None
    device: Device | None = None
    variables: dict[str, str] = Field(default_factory=dict)
    code: str | None = None  # SHA-256 of the package's source


class RunProcess(Record):
    """A process that took part in a run; all but the last were killed or interrupted."""

    process_id: NonNegative
    hostname: str
    started_at: str  # ISO 8601, UTC
