"""Text in, text out: captures the graphs that a few prompts need and serves them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cgprof.batch.request import Request
from cgprof.config.schema import ModelConfig, RunConfig
from cgprof.engine.engine import serve
from cgprof.engine.worker import Engine
from cgprof.errors import ConfigError
from cgprof.graphs.plan_record import resolve_plan
from cgprof.models.tokenizer import Tokenizer
from cgprof.shapes import RuntimeMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the tokens of every prompt are chosen; greedy when `temperature` is 0."""

    max_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a prompt became. `finish_reason` is `stop` at the end token, else `length`."""

    prompt: str
    text: str
    prompt_tokens: int
    token_ids: tuple[int, ...]
    finish_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The completions in the order of the prompts, and how their steps ran."""

    completions: tuple[Completion, ...]
    captured_graphs: int
    replayed_steps: int
    eager_steps: int


def load_tokenizer(model: ModelConfig) -> Tokenizer:
    """Returns the tokenizer beside a model's card.

    Raises:
        ConfigError: The card has no directory, this has no tokenizer, or it is another model's.
    """
    where = f"model {model.name}"
    if model.directory is None:
        raise ConfigError(where, "has no tokenizer; choose a directory with a tokenizer.json")
    tokenizer = Tokenizer.load(model.directory)
    if tokenizer.vocab_size > model.vocab_size:
        raise ConfigError(
            where,
            f"its tokenizer has {tokenizer.vocab_size} tokens, its vocabulary {model.vocab_size}",
        )
    return tokenizer


def generate_texts(
    run: RunConfig,
    model: ModelConfig,
    prompts: Sequence[str],
    sampling: Sampling,
    *,
    progress: Callable[[str], None],
) -> Generation:
    """Serves all prompts at once with the policy of `run`, and turns their tokens into text.

    Requests and positions are bounded by what the prompts need, so that no graph or cache is made
    for more; a list of capture sizes keeps the run's bound on requests.

    Raises:
        CgprofError: There is no tokenizer, a prompt is too long, or the model cannot run.
    """
    tokenizer = load_tokenizer(model)
    requests = [
        Request(
            request_id=str(index),
            prompt=tuple(tokenizer.encode(prompt)),
            max_new_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            seed=sampling.seed,
            stop_token=tokenizer.eos_id,
        )
        for index, prompt in enumerate(prompts)
    ]
    run = _bounded(run, requests)
    _, plan = resolve_plan(run, model)
    progress(f"building {model.name}")
    engine = Engine(run, model, plan)
    try:
        with engine.active():
            for index, key in enumerate(plan.keys, start=1):
                progress(f"capture {index}/{len(plan.keys)} {key}")
                engine.capture(key, lambda phase: None)
            outputs = serve(engine, requests)
        decisions = engine.runner.decisions
        replayed = sum(n for (key, _), n in decisions.items() if key.mode is RuntimeMode.FULL)
        return Generation(
            completions=tuple(
                _completion(text, request, outputs[request.request_id], tokenizer)
                for text, request in zip(prompts, requests, strict=True)
            ),
            captured_graphs=len(plan.keys),
            replayed_steps=replayed,
            eager_steps=decisions.total() - replayed,
        )
    finally:
        engine.close()


def _bounded(run: RunConfig, requests: Sequence[Request]) -> RunConfig:
    limits = run.limits
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    length = -(-longest // limits.block_size) * limits.block_size
    bounds = {"max_model_len": min(limits.max_model_len, length)}
    if run.capture.sizes is None:
        bounds["max_num_seqs"] = min(limits.max_num_seqs, len(requests))
    return run.model_copy(update={"limits": limits.model_copy(update=bounds)})


def _completion(
    prompt: str, request: Request, tokens: tuple[int, ...], tokenizer: Tokenizer
) -> Completion:
    stopped = request.stop_token is not None and tokens[-1:] == (request.stop_token,)
    return Completion(
        prompt=prompt,
        text=tokenizer.decode(tokens),
        prompt_tokens=len(request.prompt),
        token_ids=tokens,
        finish_reason="stop" if stopped else "length",
    )
