"""The record of a run. Times are integers of ns, memory of bytes; what was not read is None."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from cgprof.config.schema import ModelConfig, RunConfig
from cgprof.record.alone import NodeModel, StandAlone
from cgprof.record.contents import GraphContents, WorkDifference
from cgprof.record.cost import LaunchModel, ReplayCost
from cgprof.record.graph import GraphRecord, MemoryTotals
from cgprof.record.overlap import TracedReplay
from cgprof.record.place import Environment, RunProcess
from cgprof.record.scores import AccuracyResult, CheckRecord, PairedVerdict
from cgprof.record.strict import NonNegative, Record
from cgprof.record.votes import VetoCount
from cgprof.record.worth import WorthRecord
from cgprof.shapes import CapturePolicy, DecisionReason, GraphKey

SCHEMA_VERSION = 6
READABLE_VERSIONS = (2, 3, 4, 5, 6)  # a newer one only adds what may be absent
# The first version that has a setting, and what older ones did without it.
_LATER_SETTINGS = ((6, "capture", "finish_graphs", False), (6, "measure", "slow_host_repeats", 0))
_DROPPED_SETTINGS = (("measure", "pin_host"),)  # that older runs may have


class DecisionCount(Record):
    """How often a step ran as one key for one reason."""

    label: str
    reason: DecisionReason
    count: NonNegative
    eager_split: bool = False


class RankRecord(Record):
    """One rank's graphs."""

    rank: NonNegative = 0
    graphs: tuple[GraphRecord, ...] = ()
    decisions: tuple[DecisionCount, ...] = ()
    vetoes: tuple[VetoCount, ...] = ()  # of splitting, by any rank; equal on all
    totals: MemoryTotals | None = None
    contents: dict[str, GraphContents] = Field(default_factory=dict)  # by label of the key
    against_eager: dict[str, WorkDifference] = Field(default_factory=dict)
    replay_costs: dict[str, ReplayCost] = Field(default_factory=dict)
    launch_model: LaunchModel | None = None
    timelines: dict[str, TracedReplay] = Field(default_factory=dict)
    stand_alone: tuple[StandAlone, ...] = ()
    node_model: NodeModel | None = None
    left_out: dict[str, str] = Field(default_factory=dict)  # by the measured graph memory
    notes: tuple[str, ...] = ()  # what was not measured, and why


class SkippedKey(Record):
    """A key that was considered and not planned."""

    key: GraphKey
    label: str
    reason: str


class PlannedMode(Record):
    """How steps of one key were asked to run and how they run; `reason` where the two differ."""

    label: str
    requested: str
    effective: str
    reason: str = ""


class PlanRecord(Record):
    """The plan as it was printed, with what became of the policy that was asked for."""

    requested_policy: CapturePolicy
    policy: CapturePolicy
    policy_reason: str = ""
    labels: tuple[str, ...]
    modes: tuple[PlannedMode, ...] = ()  # of every planned and every skipped key
    skipped: tuple[SkippedKey, ...] = ()
    uncovered_batches: tuple[int, ...] = ()  # decode request counts that no key covers
    fingerprint: str


class Failure(Record):
    """Something that went wrong and did not end the run."""

    where: str
    error: str
    message: str


class RunRecord(Record):
    """A whole run."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    status: Literal["partial", "complete", "failed"]
    recorder: Literal["cuda", "tape"]
    capture_error_mode: str | None = None  # of cudaStreamBeginCapture; None on a tape
    started_at: str  # ISO 8601, UTC
    config: RunConfig
    config_fingerprint: str
    model: ModelConfig
    plan: PlanRecord
    environment: Environment
    timer_floor_ns: NonNegative | None = None
    recording_overhead_ns: NonNegative | None = None
    # "start to first captured key", "capture of plain keys", ...
    process_seconds: dict[str, float] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()
    ranks: tuple[RankRecord, ...] = ()
    worth: WorthRecord | None = None
    accuracy: tuple[AccuracyResult, ...] = ()
    verdicts: tuple[PairedVerdict, ...] = ()  # of accuracy, replay against eager
    accuracy_note: str = ""  # why there is no accuracy
    check: CheckRecord | None = None
    command: Literal["capture", "check"] | None = None
    processes: tuple[RunProcess, ...] = ()
    failures: tuple[Failure, ...] = ()
    dropped_settings: dict[str, str] = Field(default_factory=dict)  # of the version that wrote it

    @model_validator(mode="before")
    @classmethod
    def _of_older_versions(cls, values: object) -> object:
        """Takes out settings that older versions had, and puts in what they did without one."""
        if not isinstance(values, dict) or not isinstance(values.get("config"), dict):
            return values
        config, dropped = dict(values["config"]), dict(values.get("dropped_settings", {}))
        for part, name in _DROPPED_SETTINGS:
            settings = config.get(part)
            if isinstance(settings, dict) and name in settings:
                dropped[f"{part}.{name}"] = str(settings[name])
                config[part] = {key: value for key, value in settings.items() if key != name}
        for since, part, name, before in _LATER_SETTINGS:
            settings, version = config.get(part), values.get("schema_version")
            if isinstance(version, int) and version < since and isinstance(settings, dict):
                config[part] = {name: before, **settings}
        return {**values, "config": config, "dropped_settings": dropped}
