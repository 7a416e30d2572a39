"""The records of a run. Times are integers of ns, memory of bytes; what was not read is None.

Three kinds of number never mix: a sample (one step, a row of replays.parquet), its summary
(`LaunchStats`), and the record of a key (`GraphRecord`), which a report shows as one line.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cgprof.config.schema import ModelConfig, RunConfig
from cgprof.record.place import Environment, RunProcess
from cgprof.record.strict import NonNegative, Record
from cgprof.record.votes import VetoCount
from cgprof.record.worth import WorthRecord
from cgprof.shapes import CapturePolicy, DecisionReason, GraphKey

SCHEMA_VERSION = 2


class LaunchStats(Record):
    """Summary of the samples of one stage. `noise` is IQR over median, None below five samples."""

    count: NonNegative
    median_ns: NonNegative
    iqr_ns: NonNegative
    p95_ns: NonNegative
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


class TokenDivergence(Record):
    """Where the greedy tokens of a request first differ between two runs of one schedule."""

    request: str
    index: NonNegative  # of the generated token
    tokens: tuple[int, int]
    gaps: tuple[float | None, float | None]  # best logit minus second best, in each run
    explained: bool  # a gap so small that the noise floor alone can turn it


class GreedyResult(Record):
    """One schedule served with graphs, eager at equal padding and split, and eager unpadded."""

    passed: bool | None  # None: nothing replayed, or only explained differences
    requests: NonNegative
    steps: NonNegative
    longest_context: NonNegative
    replays: dict[str, NonNegative] = Field(default_factory=dict)  # key -> steps
    tokens_compared: NonNegative = 0
    divergences: tuple[TokenDivergence, ...] = ()  # replay against eager
    max_logit_diff: float | None = None  # of the best logits, up to each first difference
    noise_divergences: tuple[TokenDivergence, ...] = ()  # eager padded against unpadded
    noise_logit_diff: float | None = None
    identical: NonNegative = 0  # requests with the same prompt, side by side
    identical_outputs: NonNegative = 0  # different outputs among them, with graphs
    identical_outputs_eager: NonNegative = 0
    nonfinite: NonNegative = 0  # values of hidden states and logits, with graphs
    note: str = ""


class WeightsResult(Record):
    """The model's weights against a second reading of where they came from, bit by bit."""

    passed: bool | None
    source: str
    tensors: NonNegative
    different: tuple[str, ...] = ()
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


class ItemScore(Record):
    """One item of a task as one phase answered it; a row of items.parquet."""

    task: str
    kind: Literal["generate", "likelihood", "multiple-choice"]
    phase: Literal["eager", "replay"]
    item_id: str
    prompt: str
    gold: str
    output: str  # generated text, the chosen choice, or the gold text that was scored
    token_ids: tuple[int, ...]  # of the output
    score: float | None  # 1 or 0, log-probability or margin, by kind; None: not finite
    correct: bool | None = None  # None: likelihood
    answered: bool = True
    choice_scores: tuple[float | None, ...] = ()


class AccuracyResult(Record):
    """The score of one task in one phase, never without its size, error and origin."""

    task: str
    kind: Literal["generate", "likelihood", "multiple-choice"]
    phase: Literal["eager", "replay"]
    n: Annotated[int, Field(gt=0)]
    correct: NonNegative | None = None  # None: likelihood
    no_answer: NonNegative = 0
    value: float | None  # share of right items, or negative log-likelihood a token
    se: float | None = None
    low: float | None = None  # of the 95 % interval: Wilson, or normal for a likelihood
    high: float | None = None
    perplexity: float | None = None
    nonfinite: NonNegative = 0  # scores that are not finite
    subset_rule: str
    prompt_rule: str
    scoring_rule: str
    seed: int | None = None
    items_fingerprint: str  # of ids, prompts and golds
    about: Literal["plain", "twin"] | None = None  # what a replay score is meant to test
    replays: dict[str, NonNegative] = Field(default_factory=dict)  # key -> steps
    tokens_by_key: dict[str, NonNegative] = Field(
        default_factory=dict
    )  # scored tokens, eager steps included
    tokens_plain: NonNegative = 0  # scored tokens from replays of plain keys
    tokens_twin: NonNegative = 0
    tokens_eager: NonNegative = 0
    process_id: NonNegative | None = None

    @property
    def verified(self) -> bool | None:
        """Whether any scored token came from a replay of the kind it is about; None for eager."""
        if self.phase == "eager":
            return None
        return {"plain": self.tokens_plain, "twin": self.tokens_twin}.get(self.about or "", 0) > 0


class PairedVerdict(Record):
    """Two scores of one task beside each other: by items where both have them, else by errors."""

    task: str
    kind: Literal["generate", "likelihood", "multiple-choice"]
    a: str
    b: str
    test: Literal["mcnemar-exact", "paired-bootstrap", "unpaired-z", "none"]
    n_a: NonNegative
    n_b: NonNegative
    value_a: float | None
    value_b: float | None
    delta: float | None = None  # B - A
    low: float | None = None  # of the 95 % interval of delta
    high: float | None = None
    only_a: NonNegative | None = None  # items that A alone has right
    only_b: NonNegative | None = None
    items_different: NonNegative | None = None  # in output, tokens or score
    p_value: float | None = None
    detectable: float | None = None  # true difference found with 80 % power
    seed: int | None = None  # of the bootstrap
    flags: tuple[str, ...] = ()  # why the two are unlike
    verdict: Literal["same", "different", "inconclusive", "not verified"]
    rule: str


class PlantedFault(Record):
    """What a fault was stated to turn red, what it did, and whether the task alone would tell."""

    name: str
    place: str
    what: str
    stated_red: tuple[str, ...]
    stated_green: tuple[str, ...]  # legs in neither may go either way
    red: tuple[str, ...]
    green: tuple[str, ...]
    as_stated: bool
    task: PairedVerdict | None = None  # replay scores, without the fault and with it


class CheckRecord(Record):
    """What a check saw beside the parity of each key."""

    checked: tuple[str, ...]  # labels of the keys whose parity was checked
    captured: NonNegative
    sample_seed: int | None = None  # None: every captured key
    greedy: GreedyResult | None = None
    weights: WeightsResult | None = None
    plant: PlantedFault | None = None


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
