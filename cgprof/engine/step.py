"""The phases of a step: decide, prepare, launch, finish, and waiting for the tokens.

The engine holds no profiling code: `measure` puts its clock between the calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from cgprof.batch.buffers import InputBuffers
from cgprof.batch.context import ForwardContext, Handoff
from cgprof.batch.request import RequestTable
from cgprof.config.schema import Limits, MicrobatchConfig
from cgprof.engine.contexts import Contexts
from cgprof.engine.finish_graphs import FinishGraphs
from cgprof.engine.inputs import CLEAN, InputWriter, PaddingFill
from cgprof.engine.peers import Peers
from cgprof.engine.sampler import greedy, sample
from cgprof.engine.tokens import PendingTokens, TokenRing
from cgprof.engine.types import IDLE_STEP, PreparedStep, Step
from cgprof.errors import ReplayError
from cgprof.graphs.dispatch import decide, vote
from cgprof.graphs.manager import CapturedGraph, GraphManager
from cgprof.graphs.vetoes import Veto, vetoes
from cgprof.kvcache.block_table import BlockTable
from cgprof.microbatch.runner import MicrobatchRunner
from cgprof.microbatch.spread import layout
from cgprof.models.decoder import Decoder
from cgprof.moe.dispatcher import Lane, TokenDispatcher
from cgprof.moe.kept_routing import KeptRouting
from cgprof.shapes import BatchShape, DecisionReason, GraphKey, RuntimeMode, StepDecision, StepVote

_MOST_UNCOUNTED = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """What outlives every step."""

    table: RequestTable
    block_table: BlockTable
    buffers: InputBuffers
    output: torch.Tensor  # [T, D] hidden states; every pass writes its first rows
    finish_graphs: FinishGraphs


@dataclass(frozen=True, slots=True, kw_only=True)
class Splitting:
    """How steps are split, and how transfers run.

    With `kept`, steps leave out the exchange and their experts are told what it holds for the key:
    for timing only, results are wrong.
    """

    config: MicrobatchConfig
    microbatches: MicrobatchRunner | None
    enter: Callable[[int], AbstractContextManager[None]]
    handoff: Handoff  # of whole steps
    kept: Mapping[GraphKey, KeptRouting] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What follows from all ranks' votes."""

    decision: StepDecision
    vetoes: tuple[Veto, ...]


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
        dispatcher: TokenDispatcher,
        peers: Peers | None = None,
    ) -> None:
        self.model = model
        self._launched: list[StepDecision] = []  # since `_decisions` was last brought up to date
        self._decisions: Counter[tuple[GraphKey, DecisionReason]] = Counter()
        self.vetoes: Counter[Veto] = Counter()
        self.inputs = InputWriter(memory.table, memory.block_table, memory.buffers)
        self._buffers = memory.buffers
        self._output = memory.output
        self._finish_graphs = memory.finish_graphs
        self._graphs = graphs
        self._microbatches = splitting.microbatches
        self._enter = splitting.enter
        self._config = splitting.config
        self._dispatcher = dispatcher
        self._kept = splitting.kept
        self._peers = peers
        self._contexts = Contexts(
            memory.buffers,
            limits,
            handoff=splitting.handoff,
            microbatches=splitting.microbatches,
            num_ranks=1 if peers is None else peers.size,
        )
        self._votes: dict[BatchShape, StepVote] = {}
        self._known: dict[tuple[StepVote, ...], _Known] = {}
        self._known_keys: tuple[GraphKey, ...] = ()
        self._tokens = TokenRing(memory.buffers.max_num_reqs, memory.output.device)

    @property
    def has_peers(self) -> bool:
        """Whether other ranks take part in every step."""
        return self._peers is not None

    @property
    def decisions(self) -> Counter[tuple[GraphKey, DecisionReason]]:
        """How often a step was launched as each key, and why."""
        self._count()
        return self._decisions

    def forget_counts(self) -> None:
        """Counts decisions and vetoes from here on."""
        self.decisions.clear()
        self.vetoes.clear()

    def share(self, step: Step) -> tuple[StepVote, ...]:
        """Returns all ranks' votes on their steps, this rank's among them.

        Raises:
            RankError: A rank does not answer, or is unlike the others.
        """
        keys = self._graphs.keys
        if keys is not self._known_keys:
            self._known_keys, self._known, self._votes = keys, {}, {}
        own = self._votes.get(step.shape)
        if own is None:
            own = self._votes[step.shape] = vote(step.shape, keys, self._config)
        if self._peers is None:
            return (own,)
        self._peers.start(own)
        return tuple(self._peers.finish())

    def decide(self, step: Step, votes: tuple[StepVote, ...] | None = None) -> StepDecision:
        """Returns what this step runs as, by the rules that all ranks share.

        `votes` are what `share` returned for it; left out, they are exchanged here.
        """
        votes = self.share(step) if votes is None else votes
        known = self._known.get(votes)
        if known is None:
            known = self._known[votes] = _Known(
                decision=decide(votes, self._known_keys, self._config),
                vetoes=vetoes(votes, self._config),
            )
        for veto in known.vetoes:
            self.vetoes[veto] += 1
        if self._peers is not None:
            self._peers.check(known.decision)
        return known.decision

    def prepare(
        self, step: Step, decision: StepDecision, padding: PaddingFill = CLEAN
    ) -> PreparedStep:
        """Writes the step's inputs, padded to the key, and uploads them in one copy.

        Raises:
            ReplayError: The step does not fit the key, the key does not fit the buffers, or its
                graph cannot be replayed.
        """
        key = decision.key
        spread = layout(decision, step.shape.num_tokens)
        written = self.inputs.write(step, key, padding, spread)
        graph: CapturedGraph | None = None
        contexts: tuple[ForwardContext, ...] = ()
        if key.mode is RuntimeMode.FULL:
            graph = self._graphs.ready(key, step.shape)
        else:
            lens = written.host.seq_lens[: written.num_reqs]
            longest = int(lens.max(initial=1)) if key.num_reqs is None else None
            contexts = self._contexts.make(key, step.shape, written.microbatches, longest)
        return PreparedStep(
            step=step,
            decision=decision,
            graph=graph,
            contexts=contexts,
            token_slices=tuple(m.token_slice for m in written.microbatches),
            any_random=written.any_random,
            spread=spread,
        )

    def launch(self, prepared: PreparedStep, *, count: bool = True) -> torch.Tensor:
        """Enqueues the forward pass and returns the hidden states [T, D], padding rows included.

        `count` adds the step to `decisions`; steps that only set up state do not count.
        """
        if prepared.graph is not None:
            output = self._graphs.replay(prepared.graph)
        else:
            self._begin_pass("eager", prepared.decision.key)
            self._forward(prepared.contexts, prepared.token_slices)()
            output = self._output[: prepared.decision.key.num_tokens]
        if count:
            # Hashing a key takes 5 to 13 us in a step, as a launch does: it waits for a reader.
            self._launched.append(prepared.decision)
        return output

    def logits(self, prepared: PreparedStep, hidden: torch.Tensor) -> torch.Tensor:
        """Enqueues the scores [R, V] f32 of each request's last token, padding rows included."""
        return self._scores(prepared, hidden).to(torch.float32)

    def finish(self, prepared: PreparedStep, hidden: torch.Tensor) -> PendingTokens:
        """Enqueues logits, sampling and the copy of the tokens to the host.

        After the replay of a graph whose requests are greedy and run one token each, the first two
        are a graph as well; `hidden` must be what that replay returned.
        """
        tokens = self._replay_finish(prepared)
        if tokens is None:
            tokens = self._choose(prepared, hidden)
        pending = self._tokens.send(tokens, prepared.step.shape.num_reqs)
        if self._peers is not None:
            self._peers.launched(prepared.decision.key, pending.is_done)
        if len(self._launched) >= _MOST_UNCOUNTED:
            self._count()
        return pending

    def capture_factory(self, key: GraphKey) -> Callable[[], Callable[[], None]]:
        """Returns what a capture calls: it writes a batch of padding and hands out the pass."""

        def make_forward() -> Callable[[], None]:
            self._begin_pass("captured", key)
            parts = self.inputs.write(IDLE_STEP, key, CLEAN).microbatches
            contexts = self._contexts.make(key, IDLE_STEP.shape, parts, None)
            return self._forward(contexts, tuple(m.token_slice for m in parts))

        return make_forward

    def _begin_pass(self, lane: Lane, key: GraphKey) -> None:
        """Tells the exchange which communicator carries the pass, and whether it takes place."""
        kept = None
        if self._kept is not None:
            kept = self._kept.get(key)
            if kept is None:
                raise ReplayError(str(key), "no routing was kept to leave its exchange out")
            kept.begin_pass()
        self._dispatcher.lane, self._dispatcher.kept = lane, kept

    def _replay_finish(self, prepared: PreparedStep) -> torch.Tensor | None:
        """Each request's token [R] i64 by a graph; None where there is none for such a step."""
        num_reqs = prepared.decision.key.num_reqs
        if prepared.graph is None or num_reqs is None or prepared.any_random:
            return None
        return self._finish_graphs.replay(num_reqs) if self._is_in_order(prepared) else None

    def _count(self) -> None:
        self._decisions.update((one.key, one.reason) for one in self._launched)
        self._launched.clear()

    def _choose(self, prepared: PreparedStep, hidden: torch.Tensor) -> torch.Tensor:
        """Each request's token [R] i64, operator by operator."""
        scores = self._scores(prepared, hidden)
        if not prepared.any_random:
            return greedy(scores)
        num_reqs, fields = scores.shape[0], self._buffers.device_fields
        return sample(scores, fields.temperature[:num_reqs], fields.draws[:num_reqs])

    @staticmethod
    def _is_in_order(prepared: PreparedStep) -> bool:
        """Whether a request's row of the hidden states is its place in the batch."""
        return prepared.step.one_each and not prepared.spread

    def _scores(self, prepared: PreparedStep, hidden: torch.Tensor) -> torch.Tensor:
        """The scores [R, V] of each request's last token, in the model's dtype."""
        num_reqs = prepared.decision.key.num_reqs or prepared.step.shape.num_reqs
        if self._is_in_order(prepared):
            all_rows = num_reqs == hidden.shape[0]
            return self.model.scores(hidden if all_rows else hidden[:num_reqs])
        rows = self._buffers.device_fields.sample_rows[:num_reqs]
        return self.model.scores(hidden.index_select(0, rows))

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
