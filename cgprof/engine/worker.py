"""Builds one rank's engine: streams, model, cache, buffers, graphs and the runner of its steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from cgprof.attention.backend import AttentionBackend
from cgprof.attention.paged import PagedAttention
from cgprof.attention.reference import ReferenceAttention
from cgprof.batch.buffers import InputBuffers
from cgprof.batch.context import Handoff, PlainHandoff
from cgprof.batch.request import RequestTable
from cgprof.config.schema import ModelConfig, RunConfig
from cgprof.engine.live import LiveRequests
from cgprof.engine.reference import Reference
from cgprof.engine.scheduler import Scheduler
from cgprof.engine.step import Splitting, StepMemory, StepRunner
from cgprof.engine.types import Step
from cgprof.errors import DeviceError
from cgprof.graphs.cuda import CudaRecorder
from cgprof.graphs.dispatch import eager_key
from cgprof.graphs.manager import CapturedGraph, GraphManager
from cgprof.graphs.plan import CapturePlan
from cgprof.graphs.recorder import Recorder
from cgprof.graphs.tape import TapeRecorder
from cgprof.kvcache.block_table import BlockTable
from cgprof.kvcache.pool import BlockPool
from cgprof.microbatch.runner import MicrobatchRunner, StreamHandoff
from cgprof.models.decoder import Decoder
from cgprof.models.zoo import build_model, weight_bytes
from cgprof.moe.dispatcher import LocalDispatcher
from cgprof.shapes import DecisionReason, GraphKey, StepDecision

_TOKEN_BYTES = 21  # of the input buffers: id, position, slot, padding


class Engine:
    """One rank's engine. Use it inside `active()`, which makes its compute stream current."""

    def __init__(self, config: RunConfig, model_config: ModelConfig, plan: CapturePlan) -> None:
        """Makes weights, cache and buffers.

        Raises:
            DeviceError: No device of that kind, or the model and its cache do not fit.
        """
        self.config = config
        self.model_config = model_config
        self.plan = plan
        self.device = choose_device(config.measure.device)
        self.dtype: torch.dtype = getattr(torch, model_config.dtype)
        on_gpu = self.device.type == "cuda"
        self.compute_stream = torch.cuda.Stream() if on_gpu else None
        split = config.microbatch.enabled and model_config.is_moe
        self.comm_stream = torch.cuda.Stream() if on_gpu and split else None
        with self.active():
            self._build(split)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Makes the compute stream current, without gradients."""
        with torch.inference_mode(), torch.cuda.stream(self.compute_stream):
            yield

    def capture(self, key: GraphKey, mark: Callable[[str], None]) -> CapturedGraph:
        """Captures one key; `mark` is called between its phases, for memory readings."""
        return self.graphs.capture(key, self.runner.capture_factory(key), mark=mark)

    def decision_for(self, key: GraphKey) -> StepDecision:
        """Returns the decision that forces a key, for profiling and checks."""
        return StepDecision(key=key, tokens_per_rank=(key.num_tokens,), reason=DecisionReason.GRAPH)

    def live_step(self, key: GraphKey) -> Step:
        """Returns the full step of a key at the context length that launches are measured at."""
        most = max(-(-k.num_tokens // (k.num_reqs or 1)) for k in (*self.plan.keys, key))
        return self.live.live_step(
            key, self.config.measure.context_len, most=most, seed=self.config.seed
        )

    def expert_usage(self, step: Step) -> float | None:
        """Returns how many distinct experts a layer runs for this step, mean over layers."""
        if not self.model_config.is_moe:
            return None
        decision = self.decision_for(eager_key(step.shape.num_tokens))
        context = self.runner.prepare(step, decision).contexts[0]
        usage = self.model.expert_usage(context, self.output[: step.shape.num_tokens])
        return float(usage.float().mean())

    def reference(self, chunk: int) -> Reference:
        """Returns a reference for the requests that are live now."""
        return Reference(
            model=self.model,
            backend=self.backend,
            kv_cache=self.kv_cache,
            table=self.table,
            chunk=chunk,
        )

    def poison_free_kv(self) -> None:
        """Writes NaN into every block that no live request owns, block 0 included."""
        owned = {0}
        for row in self.table.requests:
            count = int(self.block_table.num_blocks[row])
            owned.update(self.block_table.array[row, :count].tolist())
        owned.discard(0)
        free = [block for block in range(self.pool.num_blocks) if block not in owned]
        for start in range(0, len(free), 1024):
            index = torch.tensor(free[start : start + 1024], device=self.device)
            self.kv_cache[:, index] = float("nan")

    def synchronize(self) -> None:
        """Waits for all work on the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Frees the graphs and ends the microbatch threads."""
        self.graphs.free()
        if self.microbatches is not None:
            self.microbatches.close()

    def _build(self, split: bool) -> None:
        config, limits = self.config, self.config.limits
        self.weights_bytes = weight_bytes(self.model_config, self.dtype)
        self._check_room(self.weights_bytes, "the weights")
        width = -(-limits.max_model_len // limits.block_size)
        largest = max((key.num_tokens for key in self.plan.keys), default=0)
        num_tokens = max(limits.max_num_batched_tokens, largest)
        self._check_step_room(num_tokens, width)
        self.model: Decoder = build_model(
            self.model_config,
            device=self.device,
            dtype=self.dtype,
            dispatcher=LocalDispatcher(loopback=split),
            batch_invariant=config.model.batch_invariant,
            seed=config.seed,
        )
        self.backend = self._attention()
        self.output = torch.zeros(
            (num_tokens, self.model_config.hidden_size), dtype=self.dtype, device=self.device
        )
        self.buffers = InputBuffers(
            max_num_tokens=num_tokens,
            max_num_reqs=limits.max_num_seqs,
            blocks_per_request=width,
            num_microbatches=config.microbatch.num_microbatches,
            device=self.device,
        )
        self.kv_cache = self._make_cache(width)
        self.model.bind_cache(self.kv_cache, self.backend)
        self.pool = BlockPool(self.kv_cache.shape[1])
        self.table = RequestTable(limits.max_num_seqs, limits.max_model_len)
        self.block_table = BlockTable(limits.max_num_seqs, width, limits.block_size, self.pool)
        self.scheduler = Scheduler(self.table, self.block_table, limits)
        self.microbatches = self._microbatch_runner() if split else None
        self.recorder: Recorder = (
            TapeRecorder()
            if self.compute_stream is None
            else CudaRecorder(self.compute_stream, [s for s in (self.comm_stream,) if s])
        )
        self.graphs = GraphManager(
            self.recorder,
            self.buffers,
            self.output,
            extra_addresses={"kv_cache": self.model.cache_address},
            on_failure=self.microbatches.abort if self.microbatches else _nothing,
        )
        self.runner = StepRunner(
            model=self.model,
            memory=StepMemory(
                table=self.table,
                block_table=self.block_table,
                buffers=self.buffers,
                output=self.output,
            ),
            graphs=self.graphs,
            splitting=Splitting(
                config=config.microbatch,
                microbatches=self.microbatches,
                enter=self.recorder.enter,
                handoff=self._plain_handoff(),
            ),
            limits=limits,
        )
        self.live = LiveRequests(
            self.runner, self.table, self.block_table, limits, self.model_config.vocab_size
        )

    def _attention(self) -> AttentionBackend:
        if self.device.type == "cpu":
            return ReferenceAttention()
        model = self.model_config
        return PagedAttention(
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=self.dtype,
            batch_invariant=self.config.model.batch_invariant,
        )

    def _make_cache(self, width: int) -> torch.Tensor:
        """The cache [layers, blocks, 2, S, G, C]: all requests at full length, or what fits."""
        limits, model = self.config.limits, self.model_config
        shape = (2, limits.block_size, model.num_kv_heads, model.head_dim)
        block_bytes = model.num_layers * torch.Size(shape).numel() * self.dtype.itemsize
        free, total = device_memory(self.device)
        kept_free = 1 - limits.gpu_memory_utilization if self.device.type == "cuda" else 0
        room = free - int(total * kept_free)
        blocks = limits.num_gpu_blocks_override or min(
            1 + limits.max_num_seqs * width, room // block_bytes
        )
        if blocks * block_bytes > free:
            raise DeviceError(
                f"a KV cache of {blocks} blocks takes {blocks * block_bytes} bytes, the device has "
                f"{free} free; lower --num-gpu-blocks-override"
            )
        if limits.num_gpu_blocks_override is None and blocks <= width:
            raise DeviceError(
                f"the KV cache needs at least {(width + 1) * block_bytes} bytes for one "
                f"request of max_model_len {limits.max_model_len}, the device has {room} left "
                "of its share; lower --max-model-len or raise --gpu-memory-utilization"
            )
        return torch.zeros((model.num_layers, blocks, *shape), dtype=self.dtype, device=self.device)

    def _check_room(self, needed: int, what: str) -> None:
        free, total = device_memory(self.device)
        if needed > free:
            raise DeviceError(
                f"{what} of {self.model_config.name} take {needed} bytes, the device has {free} "
                f"free of {total}; choose a smaller model or another --dtype"
            )

    def _check_step_room(self, num_tokens: int, blocks_per_request: int) -> None:
        num_reqs = self.config.limits.max_num_seqs
        hidden_bytes = self.model_config.hidden_size * self.dtype.itemsize
        needed = num_tokens * (hidden_bytes + _TOKEN_BYTES) + 4 * num_reqs * blocks_per_request
        free, _ = device_memory(self.device)
        if self.weights_bytes + needed > free:
            raise DeviceError(
                f"the buffers of a step of {num_tokens} tokens and {num_reqs} requests take "
                f"{needed} bytes beside {self.weights_bytes} of weights, the device has {free} "
                "free; lower --max-num-batched-tokens, --max-num-seqs or --max-model-len"
            )

    def _microbatch_runner(self) -> MicrobatchRunner:
        runner = MicrobatchRunner(
            self.config.microbatch.num_microbatches,
            compute_stream=self.compute_stream,
            comm_stream=self.comm_stream,
            timeout_s=self.config.microbatch.timeout_s,
        )
        runner.warm_threads(self.dtype)
        return runner

    def _plain_handoff(self) -> Handoff:
        if self.compute_stream is None or self.comm_stream is None:
            return PlainHandoff()
        return StreamHandoff(self.compute_stream, self.comm_stream)


def device_memory(device: torch.device) -> tuple[int, int]:
    """Returns the free and the total bytes of a device; of the host for the CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024, total
    return total, total


def choose_device(wanted: str) -> torch.device:
    """Returns the device of `auto`, `cpu` or `cuda`.

    Raises:
        DeviceError: `cuda` was asked for and none is visible.
    """
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise DeviceError("--device cuda: no CUDA device is visible; use --device cpu")
    if available and wanted != "cpu":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _nothing() -> None:
    return None
