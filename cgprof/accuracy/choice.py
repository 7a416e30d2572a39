"""What a check runs: which keys, which task, which fault; all refused before anything is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cgprof.accuracy.faults import check_keys, find_fault
from cgprof.accuracy.schedule import check_steps
from cgprof.accuracy.tasks import ARITHMETIC, Task, TaskKind, load_task
from cgprof.config.schema import ModelConfig, RunConfig
from cgprof.engine.generate import load_tokenizer
from cgprof.errors import ConfigError
from cgprof.graphs.plan_record import resolve_plan
from cgprof.models.tokenizer import Tokenizer
from cgprof.shapes import GraphKey

TRAINING = "training.json"  # beside weights that were trained on the arithmetic task
_ONE_IN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """What `cgprof check` was asked for; `task` None takes the default."""

    task: str | None = None
    task_kind: TaskKind | None = None
    limit: int | None = None
    sample: bool = False
    greedy_steps: int = 64
    plant: str | None = None

    def validate(self, run: RunConfig, model: ModelConfig) -> None:
        """Refuses what can be seen to be wrong without an engine.

        Raises:
            ConfigError: Too few or too many steps, no fault of that name, or no key for it.
        """
        check_steps(self.greedy_steps, run.limits.max_model_len)
        if self.plant is not None:
            check_keys(find_fault(self.plant), resolve_plan(run, model)[1].keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenTask:
    """A task and the words it is asked in, or why there is none; `named` if the user asked."""

    task: Task | None = None
    tokenizer: Tokenizer | None = None
    note: str = ""
    named: bool = False


def choose_task(
    model: ModelConfig,
    name: str | None = None,
    *,
    kind: TaskKind | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> ChosenTask:
    """Returns the named task, or arithmetic; a model that did not learn to answer it is scored.

    By default there is a note in place of a task that the model cannot run.

    Raises:
        ConfigError: A named task cannot be read or run.
    """
    if model.weights is None:
        note = "random weights: no task accuracy"
        if name is not None:
            raise ConfigError("--task", f"{note}; choose a --model with weights")
        return ChosenTask(note=note)
    try:
        tokenizer = load_tokenizer(model)
    except ConfigError as error:
        if name is not None:
            raise
        return ChosenTask(note=f"no task accuracy: {error}")
    if name is None and kind is None and not _is_trained(model):
        kind = "likelihood"
    task = load_task(name or ARITHMETIC, kind=kind, limit=limit, seed=seed)
    return ChosenTask(task=task, tokenizer=tokenizer, named=name is not None)


def sample_keys(keys: Sequence[GraphKey], seed: int) -> tuple[GraphKey, ...]:
    """Returns a quarter of the keys in their order, of plain keys and of twins at least one."""
    rng = np.random.default_rng(seed)
    drawn: set[GraphKey] = set()
    for is_twin in (False, True):
        kind = [key for key in keys if key.is_twin is is_twin]
        drawn.update(kind[i] for i in rng.permutation(len(kind))[: -(-len(kind) // _ONE_IN)])
    return tuple(key for key in keys if key in drawn)


def _is_trained(model: ModelConfig) -> bool:
    return model.directory is not None and (Path(model.directory) / TRAINING).is_file()
