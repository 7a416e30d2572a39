"""A stepping loop and a clock whose time the steps themselves move: exact, never waits.

For tests of what is timed and in which order; the engine's own loop is tested beside the engine.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from cgprof.config.schema import MeasureConfig, RunConfig
from cgprof.errors import CaptureError, ReplayError
from cgprof.shapes import BatchShape, DecisionReason, GraphKey, RuntimeMode, StepDecision

STAGES = {"decide": 11, "prepare": 200, "launch": 3_000, "finish": 40, "wait": 500}


def full_key(num_tokens, num_microbatches=1):
    return GraphKey(
        mode=RuntimeMode.FULL,
        num_tokens=num_tokens,
        num_reqs=num_tokens,
        uniform_query_len=1,
        num_microbatches=num_microbatches,
    )


class ScriptedClock:
    """Time moves only by `advance`, and by `read_cost` at each read."""

    def __init__(self, read_cost=0, has_device=False):
        self.now = 1_000
        self.read_cost = read_cost
        self.log = []
        self.has_device = has_device

    def advance(self, ns):
        self.now += ns

    def read_ns(self):
        self.now += self.read_cost
        self.log.append("read")
        return self.now

    def new_span(self):
        return ScriptedSpan(self)

    def synchronize(self):
        self.log.append("synchronize")


class ScriptedSpan:
    """Begins and ends when the clock says so; each read takes nothing and is in the log."""

    def __init__(self, clock):
        self._clock = clock
        self._marks = [0, 0]

    def begin(self):
        self._clock.log.append("begin")
        self._marks[0] = self._clock.now

    def end(self):
        self._clock.log.append("end")
        self._marks[1] = self._clock.now

    def ns(self):
        self._clock.log.append("device")
        return self._marks[1] - self._marks[0] if self._clock.has_device else None


class ScriptedRunner:
    """Runs steps that add one to each token on the real CPU; each stage takes its scripted time."""

    def __init__(self, clock, **costs):
        self.clock = clock
        self.costs = {**STAGES, **costs}
        self.launched = []
        self.in_flight = 0
        self.most_in_flight = 0

    def _stage(self, name, key=None):
        cost = self.costs[name]
        self.clock.log.append(name)
        self.clock.advance(cost(key) if callable(cost) else cost)

    has_peers = False

    def share(self, step):
        return ()

    def decide(self, step, votes):
        self._stage("decide")
        key = full_key(step.shape.num_tokens)
        return decision_for(key)

    def prepare(self, step, decision):
        self._stage("prepare", decision.key)
        return SimpleNamespace(decision=decision, inputs=torch.arange(decision.key.num_tokens))

    def launch(self, prepared):
        self._stage("launch", prepared.decision.key)
        self.launched.append(prepared.decision.key)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return prepared.inputs + 1

    def finish(self, prepared, hidden):
        self._stage("finish")
        return SimpleNamespace(wait=lambda: self._wait(hidden))

    def _wait(self, hidden):
        self._stage("wait")
        self.in_flight -= 1
        return hidden.numpy().astype(np.int64)


def decision_for(key):
    return StepDecision(key=key, tokens_per_rank=(key.num_tokens,), reason=DecisionReason.GRAPH)


def step_of(num_tokens):
    shape = BatchShape(num_reqs=num_tokens, num_tokens=num_tokens, max_query_len=1)
    return SimpleNamespace(shape=shape)


class ScriptedEngine:
    """What `measure.captures` and `measure.profile` ask of an engine, with scripted captures."""

    def __init__(self, keys, *, failing=(), refused=(), on_mark=None, has_device=False, **costs):
        self.config = RunConfig(
            measure=MeasureConfig(warmup=1, min_samples=5, max_samples=8, round_robin_rounds=3)
        )
        self.device = torch.device("cpu")
        self.plan = SimpleNamespace(keys=tuple(keys))
        self.ranks = None
        self.clock = ScriptedClock(has_device=has_device)
        self.runner = ScriptedRunner(self.clock, **{"launch": self._launch_cost, **costs})
        self.graphs = SimpleNamespace(captured={}, poison=lambda key: self.poisoned.append(key))
        self.poisoned = []
        self.output = torch.zeros(4, 8)
        self.kv_cache = torch.zeros(2, 16)
        self.weights_bytes = 4096
        self.recorder = SimpleNamespace(kind="cuda")
        self.finish_graphs = SimpleNamespace(device_bytes=512)
        self._failing = set(failing)
        self._refused = set(refused)
        self._on_mark = on_mark

    def capture(self, key, mark):
        for phase in ("warmed", "recorded", "instantiated"):
            if self._on_mark is not None:
                self._on_mark(key, phase)
            mark(phase)
            if key in self._failing:
                raise CaptureError(str(key), "a planted failure")
        recording = SimpleNamespace(pool_bytes=1000 * key.num_tokens, nodes={"kernel": 7})
        self.graphs.captured[key] = SimpleNamespace(
            recording=recording, capture_ns=55, instantiate_ns=5, replays=0
        )
        return self.graphs.captured[key]

    def live_step(self, key):
        return step_of(key.num_tokens)

    def decision_for(self, key):
        return decision_for(key)

    def expert_usage(self, step):
        return 2.5

    def _launch_cost(self, key):
        """Eager costs most; a graph's first replay ten times its later ones and then some."""
        if key.mode is RuntimeMode.NONE:
            return 90_000
        if key in self._refused:
            raise ReplayError(str(key), "a planted refusal")
        captured = self.graphs.captured[key]
        captured.replays += 1
        return 60_000 if captured.replays == 1 else 3_000
