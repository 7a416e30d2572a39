"""What a run is asked to do: frozen models, unknown keys refused, units in the names.

Sizes that depend on the model card are None here and filled in by `cgprof.config.load`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from cgprof.shapes import CapturePolicy
from cgprof.units import parse_bytes

Positive = Annotated[int, Field(gt=0)]
Family = Literal["qwen3", "qwen3_moe", "llama", "mixtral", "llama_moe"]
DtypeName = Literal["float32", "float16", "bfloat16"]


def _read_size(value: object) -> object:
    return parse_bytes(value) if isinstance(value, str) else value


Size = Annotated[int, Field(gt=0), BeforeValidator(_read_size)]  # also text such as "0.5GiB"

_A_DAY_S = 86_400.0  # libraries take no times much longer


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TwinPolicy(StrEnum):
    """Which plain keys stay beside the twins."""

    BOTH = "both"
    TWIN_ONLY = "twin-only"
    BAND = "band"


class ModelChoice(_Part):
    """Which model card, and how it runs."""

    name: str = "tiny-moe"
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"  # auto: safetensors if there are any, else dummy
    batch_invariant: bool = False  # fixed tiles and no size-chosen split in our kernels


class All2AllBackend(StrEnum):
    """How tokens travel to the ranks of their experts; one rank always uses its own memory."""

    ALLGATHER_REDUCESCATTER = "allgather-reducescatter"
    ALL_TO_ALL = "all-to-all"
    SYMMETRIC_MEMORY = "symmetric-memory"  # GPUs of one host
    EXACT = "exact"


class ParallelConfig(_Part):
    """Who computes what: each data-parallel rank owns a share of the experts."""

    data_parallel_size: Positive = 1
    all2all_backend: All2AllBackend = All2AllBackend.ALL_TO_ALL
    dispatch_capacity: Positive | None = None  # rows of one block for a rank; None: its tokens
    drop_over_capacity: bool = False  # else a capacity below a step's tokens is refused
    verify_decisions: bool = False  # compare every decision's hash before it is launched
    nccl_graph_mixing: bool = False  # several graphs and eager calls may share a communicator
    comm_stream_priority: Annotated[int, Field(ge=-5, le=0)] = 0
    nccl_max_ctas: Positive | None = None
    replay_timeout_s: Annotated[float, Field(gt=0, le=_A_DAY_S)] = 15
    startup_timeout_s: Annotated[float, Field(gt=0, le=_A_DAY_S)] = 600


class Limits(_Part):
    """The scheduler's bounds; buffers are allocated once at these sizes."""

    max_num_seqs: Positive = 256
    max_num_batched_tokens: Positive = 2048
    max_model_len: Positive = 4096
    block_size: Positive = 16
    num_gpu_blocks_override: Positive | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9


class CaptureConfig(_Part):
    """What to capture."""

    policy: CapturePolicy = CapturePolicy.FULL
    sizes: tuple[Positive, ...] | None = None
    max_size: Positive | None = None
    strict: bool = False  # refuse a plan that is not all that was asked for
    max_graph_memory_bytes: Size | None = None  # of all keys; plan and capture stay within it
    finish_graphs: bool = True  # logits and greedy tokens of decode steps are graphs as well


class MicrobatchConfig(_Part):
    """Dual batch overlap."""

    enabled: bool = False
    num_microbatches: Annotated[int, Field(ge=2)] = 2
    decode_token_threshold: int = 32
    prefill_token_threshold: int = 512
    twins: TwinPolicy = TwinPolicy.BOTH
    spread_real_tokens: bool = False  # lay few decode rows over all microbatches of a twin
    timeout_s: Annotated[float, Field(gt=0, le=_A_DAY_S)] = 60.0
    worth: bool = False  # time steps plain and split, with and without their exchange


class MeasureConfig(_Part):
    """How launches are timed."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    context_len: Positive = 64
    warmup: Annotated[int, Field(ge=0)] = 2
    min_samples: Annotated[int, Field(ge=5)] = 10
    max_samples: Positive = 40
    max_seconds_per_key: Annotated[float, Field(gt=0)] = 1.0
    relative_noise: Annotated[float, Field(gt=0)] = 0.03  # stop when IQR / median falls below
    slow_host_repeats: Annotated[int, Field(ge=0)] = 3  # of hot series that met a slow host
    round_robin_rounds: Annotated[int, Field(ge=0)] = 10
    memory_sample_ms: Annotated[float, Field(gt=0)] | None = None  # a thread reads; rows say so
    replay_samples: Annotated[int, Field(ge=0)] = 30  # of the replay call alone, idle and busy
    launch_model: bool = True  # from synthetic graphs; CUDA only
    trace_launches: bool = True  # host intervals of CUPTI, after all timing; CUDA only
    timelines: bool = True  # one replay of some twins and plain keys by activity; CUDA only
    stand_alone_keys: Annotated[int, Field(ge=0)] = 4  # each in a fresh process; CUDA only
    eager_work: bool = True  # kernels of eager steps, in a fresh process; CUDA only


class AccuracyConfig(_Part):
    """Which parity legs run, and at which contexts."""

    parity: bool = True
    contexts: Annotated[tuple[Positive, ...], Field(min_length=1)] = (
        *(1, 15, 16, 17, 257, 4096),  # clipped to max_model_len
    )
    long_context_keys: Annotated[int, Field(ge=0)] = (
        2  # on a CPU, keys that also see the longest ones
    )


class RunConfig(_Part):
    """Everything that decides what a run does; its fingerprint names the run."""

    model: ModelChoice = ModelChoice()
    parallel: ParallelConfig = ParallelConfig()
    limits: Limits = Limits()
    capture: CaptureConfig = CaptureConfig()
    microbatch: MicrobatchConfig = MicrobatchConfig()
    measure: MeasureConfig = MeasureConfig()
    accuracy: AccuracyConfig = AccuracyConfig()
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0


class RopeConfig(_Part):
    """Rotary embedding; `kind` 'default' has no scaling, only 'llama3' uses the last three."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_positions: int | None = None


class ModelConfig(_Part):
    """A model card in one spelling. Dense when `num_experts` is 0."""

    name: str
    family: Family
    num_layers: Positive
    hidden_size: Positive
    num_heads: Positive
    num_kv_heads: Positive
    head_dim: Positive
    ffn_size: int  # of dense layers
    vocab_size: Positive
    num_experts: int = 0
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    norm_topk: bool = True
    uniform_routing: bool = False  # each chosen expert weighs exactly 1, whatever its score
    qk_norm: bool = True
    rope: RopeConfig = RopeConfig()
    tied_embeddings: bool = False
    max_positions: Positive
    norm_eps: float = 1e-6
    dtype: DtypeName = "bfloat16"
    directory: str | None = None  # where the card lies, if it is a directory's config.json
    weights: str | None = None  # identity of the checkpoint to load; None means seeded weights
    sources: dict[str, str] = {}  # field -> where in the card it came from, or "assumed: ..."

    @property
    def is_moe(self) -> bool:
        """Whether feed-forward layers are made of experts."""
        return self.num_experts > 0
