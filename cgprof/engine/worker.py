"""Builds one rank's engine: streams, model, cache, buffers, graphs and the runner of its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch

from cgprof.attention.backend import AttentionBackend
from cgprof.attention.paged import PagedAttention
from cgprof.attention.reference import ReferenceAttention
from cgprof.batch.buffers import InputBuffers
from cgprof.batch.context import Handoff, PlainHandoff
from cgprof.batch.request import RequestTable
from cgprof.config.compat import blocks_needed
from cgprof.config.schema import ModelConfig, RunConfig
from cgprof.engine.finish_graphs import FinishGraphs
from cgprof.engine.live import LiveRequests
from cgprof.engine.peers import Peers
from cgprof.engine.reference import Reference
from cgprof.engine.room import Room, choose_device, give_back_unused
from cgprof.engine.scheduler import Scheduler
from cgprof.engine.step import Splitting, StepMemory, StepRunner
from cgprof.engine.types import Step
from cgprof.errors import RankError
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
from cgprof.moe.backends import make_dispatcher
from cgprof.moe.kept_routing import KeptRouting
from cgprof.parallel.ep import expert_range
from cgprof.parallel.groups import Ranks
from cgprof.shapes import DecisionReason, GraphKey, StepDecision


@dataclass(frozen=True, slots=True, kw_only=True)
class BareSteps:
    """A second runner and its own graphs, over the same requests and buffers.

    `kept` is what each key's experts are told; a key without it cannot leave its exchange out.
    """

    runner: StepRunner
    graphs: GraphManager
    kept: dict[GraphKey, KeptRouting]


class Engine:
    """One rank's engine. Use it inside `active()`, which makes its compute stream current."""

    def __init__(
        self,
        config: RunConfig,
        model_config: ModelConfig,
        plan: CapturePlan,
        ranks: Ranks | None = None,
    ) -> None:
        """Makes weights, cache and buffers; `ranks` is this rank among its peers, None alone.

        Raises:
            DeviceError: No device of that kind, the model and its cache do not fit, or the graphs
                that finish steps cannot be captured.
            RankError: Another rank is unlike this one, or does not answer.
        """
        self.config = config
        self.ranks = ranks
        self.peers: Peers | None = None
        self.model_config = model_config
        self.plan = plan
        self.device = choose_device(config.measure.device) if ranks is None else ranks.device
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

    @property
    def input_seed(self) -> int:
        """Seed of inputs: every rank has other tokens, so that none passes with another's."""
        return self.config.seed + (0 if self.ranks is None else self.ranks.rank)

    def capture(self, key: GraphKey, mark: Callable[[str], None]) -> CapturedGraph:
        """Captures one key; `mark` is called between its phases, for memory readings."""
        with self._patient(key):
            return self.graphs.capture(key, self.runner.capture_factory(key), mark=mark)

    def keep_routing(self, steps: BareSteps, step: Step, decision: StepDecision) -> None:
        """Runs the step eager with its exchange and keeps what its experts are told.

        Later steps of that key without exchange are told the same. Ranks call it together.
        """
        kept = KeptRouting()
        eager = replace(decision, key=decision.key.as_eager())
        steps.kept[eager.key] = kept
        prepared = steps.runner.prepare(step, eager)
        steps.runner.finish(prepared, steps.runner.launch(prepared, count=False)).wait()
        kept.complete = True
        del steps.kept[eager.key]
        steps.kept[decision.key] = kept

    def capture_bare(self, steps: BareSteps, key: GraphKey) -> None:
        """Captures one key without its exchange, beside the graph that has it."""
        with self._patient(key):
            steps.graphs.capture(key, steps.runner.capture_factory(key))

    def decision_for(self, key: GraphKey) -> StepDecision:
        """Returns the decision that forces a key, for profiling and checks."""
        size = 1 if self.ranks is None else self.ranks.size
        tokens = (key.num_tokens,) * size
        return StepDecision(key=key, tokens_per_rank=tokens, reason=DecisionReason.GRAPH)

    def live_step(self, key: GraphKey) -> Step:
        """Returns the full step of a key at the context length that launches are measured at."""
        most = max(-(-k.num_tokens // (k.num_reqs or 1)) for k in (*self.plan.keys, key))
        return self.live.live_step(
            key, self.config.measure.context_len, most=most, seed=self.input_seed
        )

    @contextmanager
    def without_exchange(self) -> Iterator[BareSteps]:
        """Gives steps that leave the exchange out: for timing only, since results are wrong.

        Afterwards their graphs are freed and no request is live.
        """
        graphs = self._new_graphs()
        try:
            kept: dict[GraphKey, KeptRouting] = {}
            yield BareSteps(runner=self._new_runner(graphs, kept), graphs=graphs, kept=kept)
        finally:
            self.synchronize()
            graphs.free()
            self._dispatcher.kept = None
            self.live.clear()

    def routings(self, step: Step) -> torch.Tensor:
        """Returns the experts of the step's tokens, ids of the whole model [MoE layers, T, K]."""
        decision = self.decision_for(eager_key(step.shape.num_tokens))
        context = self.runner.prepare(step, decision).contexts[0]
        return self.model.routings(context, self.output[: step.shape.num_tokens])

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
        if self.peers is not None:
            self.peers.close()
        self.graphs.free()
        self.finish_graphs.free()
        if self.microbatches is not None:
            self.microbatches.close()

    def release(self) -> None:
        """Gives the memory of weights and cache back, whoever still refers to them; ends use."""
        self.close()
        self.synchronize()
        weights = [weight for _, weight in self.model.named_weights()]
        for tensor in (self.kv_cache, *weights):
            tensor.untyped_storage().resize_(0)
        give_back_unused(self.device)

    def _patient(self, key: GraphKey) -> AbstractContextManager[None]:
        return nullcontext() if self.peers is None else self.peers.patient(f"capture of {key}")

    def _build(self, split: bool) -> None:
        config, limits = self.config, self.config.limits
        ranks, model_config = self.ranks, self.model_config
        experts = None
        if ranks is not None and model_config.is_moe:
            experts = expert_range(model_config.num_experts, ranks.size, ranks.rank)
        largest = max((key.num_tokens for key in self.plan.keys), default=0)
        num_tokens = max(limits.max_num_batched_tokens, largest)
        self.weights_bytes = weight_bytes(model_config, self.dtype, experts)
        room = Room(self.device, model_config, limits, self.dtype)
        room.check(self.weights_bytes, num_tokens)
        dispatcher = make_dispatcher(
            config.parallel,
            ranks,
            model_config,
            dtype=self.dtype,
            max_tokens=num_tokens,
            num_microbatches=config.microbatch.num_microbatches if split else 1,
            loopback=split,
        )
        self.model: Decoder = build_model(
            self.model_config,
            device=self.device,
            dtype=self.dtype,
            dispatcher=dispatcher,
            batch_invariant=config.model.batch_invariant,
            seed=config.seed,
            experts=experts,
        )
        self.backend = self._attention()
        self.output = torch.zeros(
            (num_tokens, self.model_config.hidden_size), dtype=self.dtype, device=self.device
        )
        self.buffers = InputBuffers(
            max_num_tokens=num_tokens,
            max_num_reqs=limits.max_num_seqs,
            blocks_per_request=room.blocks_per_request,
            num_microbatches=config.microbatch.num_microbatches,
            device=self.device,
        )
        self.kv_cache = self._make_cache(room)
        self.model.bind_cache(self.kv_cache, self.backend)
        self.pool = BlockPool(self.kv_cache.shape[1])
        self.table = RequestTable(limits.max_num_seqs, limits.max_model_len)
        self.block_table = BlockTable(
            limits.max_num_seqs, room.blocks_per_request, limits.block_size, self.pool
        )
        self.scheduler = Scheduler(self.table, self.block_table, limits)
        self.microbatches = self._microbatch_runner() if split else None
        self.recorder = self._new_recorder()
        self.graphs = self._new_graphs()
        self.finish_graphs = FinishGraphs(self.model, self.output)
        if config.capture.finish_graphs:
            self._capture_finish()
        if ranks is not None:
            self.peers = Peers(ranks, self.graphs, config)
        self._dispatcher = dispatcher
        self.runner = self._new_runner(self.graphs)
        self.live = LiveRequests(
            self.runner, self.table, self.block_table, limits, self.model_config.vocab_size
        )

    def _capture_finish(self) -> None:
        counts = [key.num_reqs for key in self.plan.keys if key.num_reqs is not None]
        if counts:
            self.finish_graphs.capture(self._new_recorder(), counts)

    def _new_recorder(self) -> Recorder:
        """A recorder with a pool of its own."""
        if self.compute_stream is None:
            return TapeRecorder()
        return CudaRecorder(self.compute_stream, [s for s in (self.comm_stream,) if s])

    def _new_graphs(self) -> GraphManager:
        return GraphManager(
            self.recorder,
            self.buffers,
            self.output,
            extra_addresses={"kv_cache": self.model.cache_address},
            on_failure=self.microbatches.abort if self.microbatches else _nothing,
        )

    def _new_runner(
        self, graphs: GraphManager, kept: Mapping[GraphKey, KeptRouting] | None = None
    ) -> StepRunner:
        return StepRunner(
            model=self.model,
            memory=StepMemory(
                table=self.table,
                block_table=self.block_table,
                buffers=self.buffers,
                output=self.output,
                finish_graphs=self.finish_graphs,
            ),
            graphs=graphs,
            splitting=Splitting(
                config=self.config.microbatch,
                microbatches=self.microbatches,
                enter=self.recorder.enter,
                handoff=self._plain_handoff(),
                kept=kept,
            ),
            limits=self.config.limits,
            dispatcher=self._dispatcher,
            peers=self.peers,
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

    def _make_cache(self, room: Room) -> torch.Tensor:
        """The cache [layers, blocks, 2, S, G, C]; ranks schedule alike, so all have the fewest."""
        blocks = room.cache_blocks()
        if self.ranks is not None:
            counts = [int(str(found)) for found in self.ranks.gather_objects(blocks)]
            blocks = min(counts)
            for what, needed in blocks_needed(self.config).items():
                if blocks < needed:
                    raise RankError(
                        counts.index(blocks),
                        f"has room for {blocks} KV blocks, {what} need {needed}; lower "
                        "--max-num-seqs or --max-model-len, or raise --gpu-memory-utilization",
                    )
        return torch.zeros(room.cache_shape(blocks), dtype=self.dtype, device=self.device)

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


def _nothing() -> None:
    return None
