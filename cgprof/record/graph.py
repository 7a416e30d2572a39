"""What is known of one graph. Times are integers of ns, memory of bytes; unread is None.

Three kinds of number never mix: a sample (one step, a row of replays.parquet), its summary
(`LaunchStats`), and the record of a key (`GraphRecord`), which a report shows as one line.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cgprof.record.strict import NonNegative, Record
from cgprof.shapes import GraphKey


class Timed(Record):
    """The middle of some times of one thing, and how far they lie apart."""

    count: NonNegative
    median_ns: NonNegative
    iqr_ns: NonNegative
    p25_ns: NonNegative | None = None  # older runs lack it

    @property
    def quiet_ns(self) -> int:
        """What it takes where little disturbs it: the lower quartile; older runs have the median.

        Neighbours on a shared host only ever add time, to half of the samples and more.
        """
        return self.median_ns if self.p25_ns is None else self.p25_ns


class LaunchStats(Timed):
    """Summary of the samples of one stage. `noise` is IQR over median, None below five samples."""

    p90_ns: NonNegative | None = None  # older runs lack it
    p95_ns: NonNegative
    p99_ns: NonNegative | None = None  # None below a hundred samples
    min_ns: NonNegative
    outliers: NonNegative
    noise: float | None
    stopped_by: str


class StageStats(Record):
    """A step's stages, each apart. `launch` runs from the first to the last enqueue."""

    vote: LaunchStats | None = None  # the exchange with the other ranks, if there are any
    decide: LaunchStats
    prepare: LaunchStats
    launch: LaunchStats
    finish: LaunchStats
    wait: LaunchStats
    device: LaunchStats | None = None  # by device events around launch
    step: LaunchStats | None = None  # the five host stages of one step together
    instrumented: bool = False  # a thread sampled memory meanwhile; not comparable with one without


class MemoryWitness(Record):
    """Three views of the same growth; never added up. Device views are None without a GPU."""

    allocator_bytes: int
    device_delta_bytes: int | None = None
    nvml_delta_bytes: int | None = None
    nvml_note: str | None = None  # why the NVML view is missing or doubtful
    neighbours: Literal["unknown", "none", "still", "moved"] | None = None  # None: no device


class GraphMemory(Record):
    """Parts of a growth, each measured by itself. `rest` is the device delta minus the parts."""

    pool_by_stream: dict[str, int]
    instantiate_bytes: int | None = None  # device memory taken by instantiate and upload
    outputs_bytes: NonNegative = 0
    workspaces: dict[str, int] = Field(default_factory=dict)  # "thread/stream" -> bytes
    rest_bytes: int | None = None

    @property
    def pool_bytes(self) -> int:
        """Growth of the graph pool over all streams."""
        return sum(self.pool_by_stream.values())


class ParityResult(Record):
    """One leg of parity for one key. Without a replay there is no verdict."""

    leg: Literal["replay-eager", "step-reference", "poisoned-padding"]
    passed: bool | None  # None: not verified
    bitwise_equal: bool
    max_abs_diff: float | None = None  # None when something is not finite
    tolerance: float | None = None  # None: bitwise is asked
    floor: float | None = None  # measured difference of two eager sizes
    nonfinite: NonNegative = 0
    tokens_compared: NonNegative = 0
    tokens_different: NonNegative = 0  # greedy tokens
    replays: NonNegative = 0
    cases: tuple[str, ...] = ()  # what was varied: contexts, request mixes
    note: str = ""


class CaptureTimes(Record):
    """Where the time of one capture went; the parts are apart and add up to the whole.

    Warm-up and record hold the preparation of the inputs before them.
    """

    warm_up_ns: NonNegative = 0
    record_ns: NonNegative = 0
    instantiate_ns: NonNegative = 0  # upload included
    gc_ns: NonNegative = 0  # of the garbage collector, taken out of the other parts
    readings_ns: NonNegative = 0  # of memory

    @property
    def total_ns(self) -> int:
        """The capture of the key from end to end."""
        parts = (self.warm_up_ns, self.record_ns, self.instantiate_ns, self.gc_ns)
        return sum(parts) + self.readings_ns


class GraphRecord(Record):
    """All that is known of one captured key; one line of the report.

    A resumed run keeps what earlier processes timed and checked; capture and memory are always
    the last one's. The process ids say which.
    """

    key: GraphKey
    label: str
    requested_mode: str | None = None  # by the policy that was asked for
    effective_mode: str | None = None  # NONE where the capture failed
    capture_ns: NonNegative | None = None
    instantiate_ns: NonNegative | None = None
    times: CaptureTimes | None = None  # of a failed capture too
    nodes: dict[str, int] = Field(
        default_factory=dict
    )  # kind -> count; "kernel" is what launches work
    memory: GraphMemory | None = None
    witness: MemoryWitness | None = None
    eager: StageStats | None = None
    replay: StageStats | None = None  # the same key again and again (hot)
    round_robin: StageStats | None = None  # keys in turn
    first_replay_ns: NonNegative | None = None
    host_pace_ns: NonNegative | None = None  # of a fixed loop of Python beside the hot replays
    hot_repeats: NonNegative = 0  # how often a faster host's hot replays took their place
    bound: Literal["host", "device"] | None = None  # what an eager step waits for; None: no device
    launches_outside: dict[str, int] = Field(
        default_factory=dict
    )  # what a step of this key enqueues beside its graph
    sampled_peak_bytes: NonNegative | None = None  # used memory seen by sampling during capture
    experts_hit: float | None = None  # distinct experts that a layer runs, mean over layers
    # What a step sends to other ranks in all layers: by its shapes, and the least by its routing.
    exchange_moved_bytes: NonNegative | None = None
    exchange_needed_bytes: NonNegative | None = None
    parity: tuple[ParityResult, ...] = ()
    replays: NonNegative = 0
    warnings: tuple[str, ...] = ()
    failure: str | None = None
    capture_process_id: NonNegative | None = None  # of memory as well
    timing_process_id: NonNegative | None = None
    round_robin_process_id: NonNegative | None = None
    parity_process_id: NonNegative | None = None


class MemoryTotals(Record):
    """Growth over the whole capture, plain keys first. The headline is the device delta."""

    source: Literal["device", "tape-arena"]
    outputs_bytes: NonNegative
    plain_bytes: int
    twin_bytes: int
    plain_witness: MemoryWitness
    twin_witness: MemoryWitness
    kv_cache_bytes: NonNegative
    weights_bytes: NonNegative
    communicators: dict[str, NonNegative] = Field(default_factory=dict)  # before any capture
    finish_graphs_bytes: NonNegative | None = None  # on the device, before any capture
