"""Which runs may be set side by side, and what still differs between those that may."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cgprof.errors import UnsupportedError
from cgprof.record.types import RunRecord
from cgprof.report.headline import kv_cache_text
from cgprof.report.layout import one_line

_NO_DEVICE = "none"
# Measured after everything that is compared, or choosing by the host alone: they decide none of it.
_AFTERWARDS = {
    *("replay_samples", "launch_model", "trace_launches", "timelines"),
    *("stand_alone_keys", "eager_work", "slow_host_repeats"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One field that two runs do not share."""

    field: str
    a: str
    b: str

    def to_text(self) -> str:
        """Returns the field with both values."""
        return one_line(f"{self.field}: {self.a} in A, {self.b} in B")


def require_comparable(a: RunRecord, b: RunRecord, *, force: bool) -> tuple[Difference, ...]:
    """Returns what makes the runs incomparable and was forced; nothing when they are comparable.

    Raises:
        UnsupportedError: the runs differ in what decides a time; names each field with both
            values. Different recorders are refused even when forced.
    """
    if a.recorder != b.recorder:
        different = Difference(field="recorder", a=a.recorder, b=b.recorder)
        raise UnsupportedError(
            "compare",
            f"{different.to_text()}; CPU stand-in times are never set beside GPU times; "
            "record both runs on the same kind of machine",
        )
    found = _different(_deciding_facts(a), _deciding_facts(b))
    if found and not force:
        listed = "; ".join(difference.to_text() for difference in found)
        raise UnsupportedError(
            "compare", f"{listed}; record both runs alike, or force the comparison with --force"
        )
    return found


def other_differences(a: RunRecord, b: RunRecord) -> tuple[Difference, ...]:
    """Returns settings and surroundings that differ and are allowed to: they explain a change."""
    return _different(_other_facts(a), _other_facts(b))


def _deciding_facts(record: RunRecord) -> dict[str, str]:
    environment, device = record.environment, record.environment.device
    measure = record.config.measure.model_dump(exclude={"device", *_AFTERWARDS})
    card = record.model.model_dump(exclude={"name", "dtype", "sources", "directory"})
    return {
        "device": device.name if device else _NO_DEVICE,
        "cpu": environment.cpu or _NO_DEVICE,
        **_flat("model", card),
        "dtype": record.model.dtype,
        "torch": environment.torch,
        "cuda": environment.cuda or _NO_DEVICE,
        **_flat("measure", measure),
    }


def _other_facts(record: RunRecord) -> dict[str, str]:
    environment, device = record.environment, record.environment.device
    config = record.config.model_dump(mode="json", exclude={"measure", "model"})
    return {
        **_flat("", config),
        **_flat("measure", record.config.measure.model_dump(include=_AFTERWARDS)),
        "model.name": record.model.name,
        "model.batch_invariant": str(record.config.model.batch_invariant),
        "policy": record.plan.policy.value,
        "KV cache": kv_cache_text(record) or "unknown",
        "device uuid": (device.uuid if device else None) or _NO_DEVICE,
        "driver": (device.driver if device else None) or _NO_DEVICE,
        "triton": environment.triton or _NO_DEVICE,
        "python": environment.python,
        "hostname": environment.hostname,
        "cgprof": environment.cgprof,
        "status": record.status,
        **_flat("variables", environment.variables),
        **record.dropped_settings,
    }


def _flat(prefix: str, values: Mapping[str, object]) -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in values.items():
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(value, Mapping):
            flat |= _flat(path, value)
        else:
            flat[path] = str(value)
    return flat


def _different(a: dict[str, str], b: dict[str, str]) -> tuple[Difference, ...]:
    names = dict.fromkeys([*a, *b])
    return tuple(
        Difference(field=name, a=a.get(name, "absent"), b=b.get(name, "absent"))
        for name in names
        if a.get(name) != b.get(name)
    )
