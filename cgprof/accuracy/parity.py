"""Same numbers as eager: two legs for every captured key, and padding that holds garbage.

- `replay-eager`: the replay equals an eager pass at the same padding and split, bit by bit.
- `step-reference`: the replay equals a pass from fresh buffers and a fresh cache, unpadded and
  unsplit, rebuilt from the token lists, within the measured floor (`cgprof.accuracy.noise`).
- `poisoned-padding`: with another request's values in the padding rows the real rows stay the
  same bit by bit, and nobody's KV changes.

Free KV blocks hold NaN and the output is NaN before each pass, so that a row that is not written,
or is read from nobody's block, shows as not finite.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from cgprof.accuracy.cases import Filling, ParityCase, cases_for, make_filling
from cgprof.accuracy.noise import Distance, allowance, block_sums, distance, token_errors
from cgprof.accuracy.tally import Outcome, Tally
from cgprof.engine.inputs import CLEAN, PaddingFill
from cgprof.engine.live import make_step
from cgprof.engine.reference import Reference
from cgprof.engine.types import Step
from cgprof.engine.worker import Engine
from cgprof.record.graph import ParityResult
from cgprof.shapes import GraphKey, RuntimeMode

_CPU_LONGEST = 257
_CPU_VARIED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expected:
    """The reference's hidden states of a whole filling, in one pass; and a second reference."""

    hidden: torch.Tensor  # [t, D]
    starts: NDArray[np.int64]  # [r] first row of each request
    other: Reference  # with contexts computed in other chunks


class ParityChecker:
    """Checks keys of one engine, inside `active()`; keeps the references, which all keys share."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._expected: dict[Filling, _Expected] = {}

    def check(self, key: GraphKey) -> tuple[ParityResult, ...]:
        """Returns both legs and the poisoned padding of a key, over all its cases."""
        engine = self._engine
        exact, near = Tally("replay-eager"), Tally("step-reference")
        poisoned = Tally("poisoned-padding")
        if key not in engine.graphs.keys:
            for tally in (exact, near, poisoned):
                tally.notes.append("not captured")
            return exact.result(False), near.result(False), poisoned.result(False)
        filling = self.filling_for(key)
        whole = self.fill(filling)
        expected = self._reference(filling, whole)
        errors: list[torch.Tensor] = []
        for case in cases_for(key, filling):
            step, name = case_step(whole, case, key), case.describe(filling)
            replay = self._replay(exact, key, step)
            if case.is_padded(key):
                self._check_poisoned(poisoned, key, step, replay, name)
            exact.compare(replay, self.run(key.as_eager(), step), name)
            wanted = self._expected_of(case, step, expected)
            near.compare(replay, wanted, name)
            errors.append(token_errors(replay.hidden, wanted.hidden))
            self._check_unsplit(near, key, step, replay)
        near.replays = exact.replays
        if not poisoned.replays:
            poisoned.notes.append("no case of this key has padding rows")
        if poisoned.faults:
            engine.live.clear()  # the next key must not inherit a spoilt cache
        return (
            exact.result(exact.is_exact),
            self._verdict(near, torch.cat(errors), self._floor(key, filling, whole, expected)),
            poisoned.result(poisoned.is_exact and not poisoned.faults),
        )

    def filling_for(self, key: GraphKey) -> Filling:
        """Returns the requests that a key is checked with; on a CPU few keys see long contexts."""
        engine = self._engine
        contexts: Sequence[int] = engine.config.accuracy.contexts
        varied = engine.config.limits.max_num_seqs
        if engine.device.type == "cpu":
            varied = _CPU_VARIED
            if key not in self._long_context_keys():
                contexts = [c for c in contexts if c <= _CPU_LONGEST] or [min(contexts)]
        return make_filling(
            engine.plan.keys,
            engine.config.limits,
            contexts,
            num_blocks=engine.pool.num_blocks - 1,
            max_varied=varied,
        )

    def run(self, key: GraphKey, step: Step, padding: PaddingFill = CLEAN) -> Outcome:
        """Runs a step as `key` over an output full of NaN and returns its real rows."""
        engine = self._engine
        prepared = engine.runner.prepare(step, engine.decision_for(key), padding)
        engine.output.fill_(float("nan"))
        hidden = engine.runner.launch(prepared, count=False)
        tokens = engine.runner.finish(prepared, hidden).wait().copy()
        return Outcome(hidden=hidden[: step.shape.num_tokens].clone(), tokens=tokens)

    def _replay(
        self, tally: Tally, key: GraphKey, step: Step, padding: PaddingFill = CLEAN
    ) -> Outcome:
        tally.replays += 1
        return self.run(key, step, padding)

    def fill(self, filling: Filling) -> Step:
        """Makes the requests of a filling live, unless they are, and free KV blocks NaN."""
        engine = self._engine
        step = engine.live.fill(filling.contexts, filling.query_lens, engine.input_seed)
        engine.poison_free_kv()
        return step

    def _reference(self, filling: Filling, whole: Step) -> _Expected:
        """Two references of all requests, whose contexts were computed in other chunks."""
        known = self._expected.get(filling)
        if known is not None:
            return known
        engine = self._engine
        budget = engine.config.limits.max_num_batched_tokens
        hidden = engine.reference(chunk=budget).hidden(whole)
        other = engine.reference(chunk=max(1, budget * 5 // 8))
        starts = np.cumsum(whole.query_lens, dtype=np.int64) - whole.query_lens
        expected = _Expected(hidden=hidden, starts=starts, other=other)
        self._expected[filling] = expected
        return expected

    def _expected_of(self, case: ParityCase, step: Step, expected: _Expected) -> Outcome:
        starts = expected.starts[list(case.indices)]
        rows = np.concatenate(
            [np.arange(s, s + q) for s, q in zip(starts, case.query_lens, strict=True)]
        )
        hidden = expected.hidden[torch.from_numpy(rows)]
        return Outcome(hidden=hidden, tokens=greedy_tokens(self._engine, hidden, step))

    def _floor(self, key: GraphKey, filling: Filling, whole: Step, expected: _Expected) -> Distance:
        """How far the second reference, in passes of the key's own size, is from the first.

        Which kernels a library takes depends on the size, often in no order; so the floor is
        measured at the very size of the key, and at that of its microbatches.
        """
        errors = []
        width = key.num_tokens // key.num_microbatches
        for case in cases_for(key, filling):
            step = case_step(whole, case, key)
            wanted = self._expected_of(case, step, expected).hidden
            rows = np.array_split(np.arange(step.rows.size), key.num_microbatches)
            parts = [
                make_step(step.rows[part], step.query_lens[part]) for part in rows if part.size
            ]
            passes = [
                expected.other.hidden(part, padded_tokens=max(width, part.shape.num_tokens))
                for part in parts
            ]
            errors.append(token_errors(torch.cat(passes), wanted))
        return distance(torch.cat(errors))

    def _check_unsplit(self, near: Tally, key: GraphKey, step: Step, replay: Outcome) -> None:
        """In a batch-invariant run a twin equals the whole batch bit by bit."""
        if not (key.is_twin and self._engine.config.model.batch_invariant):
            return
        whole = dataclasses.replace(key, mode=RuntimeMode.NONE, num_microbatches=1)
        if not torch.equal(replay.hidden, self.run(whole, step).hidden):
            near.faults.append(f"{step.shape.num_tokens} tokens differ from the unsplit batch")

    def _verdict(self, near: Tally, errors: torch.Tensor, floor: Distance) -> ParityResult:
        found, allowed = distance(errors), allowance(floor, self._engine.dtype)
        near.notes.append(
            f"relative L2 error a token: worst {found.worst:.2e} of {allowed.worst:.2e} allowed, "
            f"median {found.median:.2e} of {allowed.median:.2e}"
        )
        finite = bool(np.isfinite(floor.worst))
        return near.result(
            found.within(allowed) and not near.nonfinite and not near.faults,
            tolerance=allowed.worst if finite else None,
            floor=floor.worst if finite else None,
        )

    def _check_poisoned(
        self, tally: Tally, key: GraphKey, step: Step, clean: Outcome, name: str
    ) -> None:
        """Runs a step again with garbage in its padding; the clean one ran just before."""
        blocks = self._watched_blocks()
        before = block_sums(self._engine.kv_cache, blocks)
        tally.compare(self._replay(tally, key, step, self._garbage(step)), clean, name)
        changed = (block_sums(self._engine.kv_cache, blocks) != before).any(dim=0)
        if bool(changed.any()):
            tally.faults.append(f"{name}: KV blocks {blocks[changed].tolist()[:8]} changed")

    def _garbage(self, step: Step) -> PaddingFill:
        """Padding that belongs to somebody: another request's block, the last position."""
        engine = self._engine
        running = set(step.rows.tolist())
        others = [row for row in engine.table.requests if row not in running]
        row = others[0] if others else int(step.rows[-1])
        return PaddingFill(
            input_id=engine.model_config.vocab_size - 1,
            position=engine.config.limits.max_model_len - 1,
            block=int(engine.block_table.array[row, 0]),
        )

    def _watched_blocks(self) -> torch.Tensor:
        """All blocks of live requests, and the first and last of the cache, where slot -1 leads."""
        engine = self._engine
        table = engine.block_table
        owned = {0, engine.pool.num_blocks - 1}
        for row in engine.table.requests:
            owned.update(table.array[row, : table.num_blocks[row]].tolist())
        return torch.tensor(sorted(owned), device=engine.device)

    def _long_context_keys(self) -> tuple[GraphKey, ...]:
        """The largest plain key, the largest twin, and so on by size."""
        plan = self._engine.plan
        ordered = [*plan.plain[:1], *plan.twins[:1], *plan.plain[1:], *plan.twins[1:]]
        return tuple(ordered[: self._engine.config.accuracy.long_context_keys])


def case_step(whole: Step, case: ParityCase, key: GraphKey) -> Step:
    """Returns the step of a case; a uniform key sees no prompts."""
    rows = whole.rows[np.array(case.indices)]
    prefills = None if key.uniform_query_len is None else 0
    return make_step(rows, np.array(case.query_lens, np.int32), prefills)


def greedy_tokens(engine: Engine, hidden: torch.Tensor, step: Step) -> NDArray[np.int64]:
    """Returns the token [r] that each request would sample from its last row of [t, D]."""
    last = torch.from_numpy(np.cumsum(step.query_lens, dtype=np.int64) - 1)
    tokens: NDArray[np.int64] = engine.model.logits(hidden[last]).argmax(dim=-1).cpu().numpy()
    return tokens
