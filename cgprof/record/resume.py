"""Whether a run may go on in this process: all that decides its numbers must be what it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from cgprof.config.schema import ModelConfig, RunConfig
from cgprof.errors import ConfigError
from cgprof.record.place import Environment
from cgprof.record.types import PlanRecord, RunRecord

_FLAG = "--resume"
_ABSENT = "none"
# How a setting or a card is spelt, where it lies; what they mean is compared.
_SPELLING = {"model": {"name", "dtype", "load_format"}}
_CARD_SPELLING = {"name", "directory", "sources"}


def require_resumable(folder: Path, record: RunRecord) -> None:
    """Refuses a run that is no unfinished capture.

    Raises:
        ConfigError: `cgprof check` wrote it, which starts anew each time.
    """
    if record.command == "check":
        raise ConfigError(
            _FLAG, f"{folder} was written by cgprof check, which cannot go on; run it again"
        )


def require_same_request(
    folder: Path, record: RunRecord, run: RunConfig, model: ModelConfig, plan: PlanRecord
) -> None:
    """Refuses another config, another model or another plan than those of the recorded run.

    Raises:
        ConfigError: Names the first field that differs, with both values.
    """
    before = {
        **_flat("", record.config.model_dump(mode="json", exclude=_SPELLING)),
        **_flat("model", record.model.model_dump(mode="json", exclude=_CARD_SPELLING)),
        "plan": record.plan.fingerprint,
    }
    now = {
        **_flat("", run.model_dump(mode="json", exclude=_SPELLING)),
        **_flat("model", model.model_dump(mode="json", exclude=_CARD_SPELLING)),
        "plan": plan.fingerprint,
    }
    _require_same(folder, before, now, "give the settings of that run, or none")


def require_same_place(
    folder: Path, record: RunRecord, recorder: str, environment: Environment
) -> None:
    """Refuses another cgprof, other libraries, or another device than those of the recorded run.

    Raises:
        ConfigError: Names the first field that differs, with both values.
    """
    before = {"recorder": record.recorder, **_place(record.environment)}
    now = {"recorder": recorder, **_place(environment)}
    _require_same(folder, before, now, "resume where it began, or start a new run")


def _place(environment: Environment) -> dict[str, str]:
    device = environment.device
    return {
        "cgprof": environment.cgprof,
        "code": environment.code or _ABSENT,
        "device": device.name if device else _ABSENT,
        "device uuid": (device.uuid if device else None) or _ABSENT,
        "driver": (device.driver if device else None) or _ABSENT,
        "cpu": environment.cpu or _ABSENT,
        "python": environment.python,
        "torch": environment.torch,
        "triton": environment.triton or _ABSENT,
        "cuda": environment.cuda or _ABSENT,
        **_flat("variables", environment.variables),
    }


def _require_same(folder: Path, before: dict[str, str], now: dict[str, str], way_out: str) -> None:
    different = [
        name
        for name in dict.fromkeys([*before, *now])
        if before.get(name, _ABSENT) != now.get(name, _ABSENT)
    ]
    if not different:
        return
    name = different[0]
    others = "" if len(different) == 1 else f", and {len(different) - 1} more differ"
    raise ConfigError(
        _FLAG,
        f"{folder}: {name} is {now.get(name, _ABSENT)} here and {before.get(name, _ABSENT)} in "
        f"that run{others}; {way_out}",
    )


def _flat(prefix: str, values: Mapping[str, object]) -> dict[str, str]:
    return dict(_leaves(prefix, values))


def _leaves(prefix: str, values: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(value, Mapping):
            yield from _leaves(path, value)
        else:
            yield path, str(value)
