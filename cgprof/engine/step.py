"""The phases of a step: decide, prepare, launch, finish, and waiting for the tokens.

The engine holds no profiling code: `measure` puts its clock between the calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cgprof.batch.buffers import HostFields, InputBuffers
from cgprof.batch.context import AttentionMetadata, ForwardContext, Handoff, InputBatch
from cgprof.batch.request import RequestTable
from cgprof.config.schema import Limits, MicrobatchConfig
from cgprof.engine.sampler import sample, uniform_draws
from cgprof.engine.types import PreparedStep, Step
from cgprof.errors import ReplayError
from cgprof.graphs.dispatch import decide, vote
from cgprof.graphs.manager import GraphManager
from cgprof.kvcache.block_table import BlockTable
from cgprof.kvcache.slots import compute_slots, token_positions
from cgprof.microbatch.runner import MicrobatchRunner
from cgprof.microbatch.split import Microbatch, cut, fill, slice_context
from cgprof.models.decoder import Decoder
from cgprof.shapes import BatchShape, DecisionReason, GraphKey, RuntimeMode, StepDecision

_TOKEN_SLOTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingFill:
    """What padding rows hold besides slot -1 and length 0; zeros in every real step.

    Checks put another request's values there: nothing of them may reach a real row.
    """

    input_id: int = 0
    position: int = 0
    block: int = 0


CLEAN = PaddingFill()


class PendingTokens:
    """Sampled tokens on their way to the host; valid for the next few `finish` calls."""

    def __init__(self, host: torch.Tensor, done: torch.cuda.Event | None) -> None:
        self._host = host
        self._done = done

    def wait(self) -> NDArray[np.int64]:
        """Waits for the copy and returns one token a request [r]."""
        if self._done is not None:
            self._done.synchronize()
        tokens: NDArray[np.int64] = self._host.numpy()
        return tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """What outlives every step."""

    table: RequestTable
    block_table: BlockTable
    buffers: InputBuffers
    output: torch.Tensor  # [T, D] hidden states; every pass writes its first rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Splitting:
    """How steps are split, and how transfers run when they are not."""

    config: MicrobatchConfig
    microbatches: MicrobatchRunner | None
    enter: Callable[[int], AbstractContextManager[None]]
    handoff: Handoff  # of whole steps


class StepRunner:
    """Runs steps over one set of buffers. Call everything on the engine's compute stream."""

    def __init__(
        self,
        *,
        model: Decoder,
        memory: StepMemory,
        graphs: GraphManager,
        splitting: Splitting,
        limits: Limits,
    ) -> None:
        self.model = model
        self.decisions: Counter[tuple[GraphKey, DecisionReason]] = Counter()
        self._table = memory.table
        self._block_table = memory.block_table
        self._buffers = memory.buffers
        self._output = memory.output
        self._graphs = graphs
        self._microbatches = splitting.microbatches
        self._enter = splitting.enter
        self._handoff = splitting.handoff
        self._limits = limits
        self._config = splitting.config
        self._known: dict[BatchShape, StepDecision] = {}
        self._known_keys: tuple[GraphKey, ...] = ()
        self._tokens = _TokenRing(memory.buffers.max_num_reqs, memory.output.device)

    def decide(self, step: Step) -> StepDecision:
        """Returns what this step runs as, by the rules that all ranks share."""
        keys = self._graphs.keys
        if keys is not self._known_keys:
            self._known_keys = keys
            self._known = {}
        decision = self._known.get(step.shape)
        if decision is None:
            decision = decide([vote(step.shape, keys, self._config)], keys, self._config)
            self._known[step.shape] = decision
        return decision

    def prepare(
        self, step: Step, decision: StepDecision, padding: PaddingFill = CLEAN
    ) -> PreparedStep:
        """Writes the step's inputs, padded to the key, and uploads them in one copy.

        Raises:
            ReplayError: The step does not fit the key, or the key does not fit the buffers.
        """
        key = decision.key
        host, num_reqs, microbatches = self._write(step, key, padding)
        if key.mode is RuntimeMode.FULL:
            contexts: tuple[ForwardContext, ...] = ()
        else:
            longest = int(host.seq_lens[:num_reqs].max()) if key.num_reqs is None else None
            contexts = self._contexts(key, step.shape, microbatches, longest)
        return PreparedStep(
            step=step,
            decision=decision,
            contexts=contexts,
            token_slices=tuple(microbatch.token_slice for microbatch in microbatches),
            any_random=bool(host.temperature[: step.rows.size].any()),
        )

    def launch(self, prepared: PreparedStep, *, count: bool = True) -> torch.Tensor:
        """Enqueues the forward pass and returns the hidden states [T, D], padding rows included.

        `count` adds the step to `decisions`; steps that only set up state do not count.
        """
        key = prepared.decision.key
        if count:
            self.decisions[key, prepared.decision.reason] += 1
        if key.mode is RuntimeMode.FULL:
            return self._graphs.replay(key, prepared.step.shape)
        self._forward(prepared.contexts, prepared.token_slices)()
        return self._output[: key.num_tokens]

    def logits(self, prepared: PreparedStep, hidden: torch.Tensor) -> torch.Tensor:
        """Enqueues the scores [R, V] f32 of each request's last token, padding rows included."""
        num_reqs = prepared.decision.key.num_reqs or prepared.step.shape.num_reqs
        rows = self._buffers.device_fields.sample_rows[:num_reqs]
        return self.model.logits(hidden.index_select(0, rows))

    def finish(self, prepared: PreparedStep, hidden: torch.Tensor) -> PendingTokens:
        """Enqueues logits, sampling and the copy of the tokens to the host."""
        fields = self._buffers.device_fields
        logits = self.logits(prepared, hidden)
        num_reqs = logits.shape[0]
        tokens = sample(
            logits,
            fields.temperature[:num_reqs],
            fields.draws[:num_reqs],
            any_random=prepared.any_random,
        )
        return self._tokens.send(tokens, prepared.step.shape.num_reqs)

    def capture_factory(self, key: GraphKey) -> Callable[[], Callable[[], None]]:
        """Returns what a capture calls: it writes a batch of padding and hands out the pass."""

        def make_forward() -> Callable[[], None]:
            nobody = np.zeros(0, np.int32)
            shape = BatchShape(num_reqs=0, num_tokens=0, max_query_len=0)
            step = Step(rows=nobody, query_lens=nobody, shape=shape)
            _, _, microbatches = self._write(step, key, CLEAN)
            contexts = self._contexts(key, shape, microbatches, None)
            return self._forward(contexts, tuple(m.token_slice for m in microbatches))

        return make_forward

    def _forward(
        self, contexts: Sequence[ForwardContext], token_slices: Sequence[slice]
    ) -> Callable[[], None]:
        """The pass itself: whole, or parked microbatches that the returned call releases."""
        if len(contexts) == 1:
            out = self._output[: contexts[0].batch.padded.num_tokens]
            return lambda: self.model.forward(contexts[0], out)
        if self._microbatches is None:
            raise ReplayError(str(contexts[0].batch.padded), "this engine has no microbatch runner")

        def work(context: ForwardContext, rows: slice) -> Callable[[], None]:
            return lambda: self.model.forward(context, self._output[rows])

        works = [work(c, rows) for c, rows in zip(contexts, token_slices, strict=True)]
        self._microbatches.park(works, self._enter)
        return self._microbatches.release

    def _check_fit(self, key: GraphKey, shape: BatchShape) -> int:
        """Returns the padded number of requests; these bounds guard the writes that follow."""
        num_reqs = shape.num_reqs if key.num_reqs is None else key.num_reqs
        tokens, reqs = self._buffers.max_num_tokens, self._buffers.max_num_reqs
        if key.num_tokens > tokens or num_reqs > reqs:
            raise ReplayError(str(key), f"the buffers hold {tokens} tokens and {reqs} requests")
        if shape.num_tokens > key.num_tokens or shape.num_reqs > num_reqs:
            raise ReplayError(
                str(key), f"{shape.num_tokens} tokens of {shape.num_reqs} requests do not fit"
            )
        return num_reqs

    def _write(
        self, step: Step, key: GraphKey, padding: PaddingFill
    ) -> tuple[HostFields, int, tuple[Microbatch, ...]]:
        """Writes and uploads every field; returns the host's, the padded requests and the parts."""
        num_reqs = self._check_fit(key, step.shape)
        host = self._buffers.begin()
        self._write_requests(host, step, num_reqs, padding)
        self._write_tokens(host, step, key.num_tokens, padding)
        microbatches = self._split(host, key, num_reqs, step.query_lens)
        self._buffers.commit(num_reqs)
        return host, num_reqs, microbatches

    def _write_requests(
        self, host: HostFields, step: Step, num_reqs: int, padding: PaddingFill
    ) -> None:
        rows, table, real = step.rows, self._table, step.rows.size
        starts, lens = host.query_start_loc[: real + 1], host.seq_lens[:real]
        starts[0] = 0
        step.query_lens.cumsum(out=starts[1:])
        np.add(table.num_computed[rows], step.query_lens, out=lens)
        np.subtract(starts[1:], 1, out=host.sample_rows[:real])
        temperature = table.temperature[rows]
        host.temperature[:real] = temperature
        # A greedy token needs no draw.
        host.draws[:real] = uniform_draws(table.seed[rows], lens) if temperature.any() else 0
        self._block_table.array.take(rows, axis=0, out=host.block_table[:real], mode="clip")
        if real < num_reqs:
            pad = slice(real, num_reqs)
            host.query_start_loc[real + 1 : num_reqs + 1] = step.shape.num_tokens
            host.seq_lens[pad] = 0
            host.sample_rows[pad] = 0
            host.temperature[pad] = 0
            host.draws[pad] = 0
            host.block_table[pad] = padding.block

    def _write_tokens(
        self, host: HostFields, step: Step, num_tokens: int, padding: PaddingFill
    ) -> None:
        rows, lens, real = step.rows, step.query_lens, step.shape.num_tokens
        positions = host.positions[:real]
        token_positions(self._table.num_computed[rows], lens, positions)
        token_rows = np.repeat(rows, lens)
        host.input_ids[:real] = self._table.token_ids[token_rows, positions]
        compute_slots(
            self._block_table.array,
            token_rows,
            positions,
            self._limits.block_size,
            host.slot_mapping[:real],
        )
        host.is_padding[:real] = False
        if real < num_tokens:
            pad = slice(real, num_tokens)
            host.positions[pad] = padding.position
            host.input_ids[pad] = padding.input_id
            host.slot_mapping[pad] = -1
            host.is_padding[pad] = True

    def _split(
        self, host: HostFields, key: GraphKey, num_reqs: int, query_lens: NDArray[np.int32]
    ) -> tuple[Microbatch, ...]:
        if key.num_microbatches == 1:
            return ()
        microbatches = cut(query_lens, key, num_reqs)
        fill(
            microbatches,
            host.query_start_loc[: num_reqs + 1],
            host.seq_lens[:num_reqs],
            host.split_query_start_loc,
            host.split_seq_lens,
        )
        return microbatches

    def _contexts(
        self,
        key: GraphKey,
        shape: BatchShape,
        microbatches: Sequence[Microbatch],
        longest: int | None,
    ) -> tuple[ForwardContext, ...]:
        """The whole batch's context, or one a microbatch; `longest` None takes the key's bounds."""
        fields = self._buffers.device_fields
        num_reqs = shape.num_reqs if key.num_reqs is None else key.num_reqs
        exact = longest is not None
        whole = ForwardContext(
            batch=InputBatch(
                shape=shape,
                padded=key,
                input_ids=fields.input_ids[: key.num_tokens],
                positions=fields.positions[: key.num_tokens],
                is_padding=fields.is_padding[: key.num_tokens],
            ),
            attention=AttentionMetadata(
                query_start_loc=fields.query_start_loc[: num_reqs + 1],
                seq_lens=fields.seq_lens[:num_reqs],
                block_table=fields.block_table[:num_reqs],
                slot_mapping=fields.slot_mapping[: key.num_tokens],
                max_query_len=(
                    shape.max_query_len if exact else key.uniform_query_len or key.num_tokens
                ),
                max_seq_len=longest if longest is not None else self._limits.max_model_len,
            ),
            tokens_per_rank=(key.num_tokens,),
            handoff=self._handoff,
        )
        if not microbatches or self._microbatches is None:
            return (whole,)
        return tuple(
            slice_context(
                whole,
                microbatch,
                fields.split_query_start_loc,
                fields.split_seq_lens,
                self._microbatches.handoff(microbatch.index),
            )
            for microbatch in microbatches
        )


class _TokenRing:
    """Host buffers for sampled tokens, used in turn."""

    def __init__(self, max_num_reqs: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._host = [
            torch.zeros(max_num_reqs, dtype=torch.int64, pin_memory=on_gpu)
            for _ in range(_TOKEN_SLOTS)
        ]
        self._done = [torch.cuda.Event() if on_gpu else None for _ in range(_TOKEN_SLOTS)]
        self._next = 0

    def send(self, tokens: torch.Tensor, num_reqs: int) -> PendingTokens:
        index = self._next
        self._next = (index + 1) % _TOKEN_SLOTS
        host, done = self._host[index][:num_reqs], self._done[index]
        host.copy_(tokens[:num_reqs], non_blocking=True)
        if done is not None:
            done.record()
        return PendingTokens(host, done)
