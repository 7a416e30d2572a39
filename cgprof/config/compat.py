"""Combinations that are refused before anything is built, each with its reason and the way out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cgprof.config.flags import spell
from cgprof.config.schema import ModelConfig, RunConfig
from cgprof.errors import ConfigError, UnsupportedError
from cgprof.shapes import CapturePolicy, RuntimeMode

Rule = Callable[[RunConfig, ModelConfig], Iterator[ConfigError]]


def check(run: RunConfig, model: ModelConfig) -> None:
    """Checks a run against the table below.

    Raises:
        UnsupportedError: Two settings, or a setting and the model, do not go together.
        ConfigError: One setting is wrong by itself.
    """
    for rule in _RULES:
        for error in rule(run, model):
            raise error


def _dbo_needs_experts(run: RunConfig, model: ModelConfig) -> Iterator[ConfigError]:
    if run.microbatch.enabled and not model.is_moe:
        yield UnsupportedError(
            spell("microbatch.enabled"),
            f"there are no experts in this config ({model.name}), so dual batch overlap has no "
            "exchange to hide; leave --dbo out or choose a mixture-of-experts model",
        )


def _thresholds_fill_microbatches(run: RunConfig, model: ModelConfig) -> Iterator[ConfigError]:
    config = run.microbatch
    if not config.enabled:
        return
    for field in ("decode_token_threshold", "prefill_token_threshold"):
        threshold = getattr(config, field)
        if threshold < config.num_microbatches:
            yield UnsupportedError(
                spell(f"microbatch.{field}"),
                f"{threshold} is below the {config.num_microbatches} microbatches, one of which "
                f"would be empty; use {config.num_microbatches} or more",
            )


def _block_size_is_power_of_two(run: RunConfig, model: ModelConfig) -> Iterator[ConfigError]:
    size = run.limits.block_size
    if size & (size - 1):
        lower = 1 << (size.bit_length() - 1)
        yield ConfigError(
            spell("limits.block_size"),
            f"{size} is not a power of two; use {lower} or {2 * lower}",
        )


def _sizes_are_given(run: RunConfig, model: ModelConfig) -> Iterator[ConfigError]:
    if run.capture.sizes == () and run.capture.policy is not CapturePolicy.NONE:
        yield UnsupportedError(
            spell("capture.sizes"),
            f"the list is empty, so policy {run.capture.policy.value} would capture nothing; "
            "leave it out for the default sizes, or use --mode none",
        )


def _measured_context_fits(run: RunConfig, model: ModelConfig) -> Iterator[ConfigError]:
    context, length = run.measure.context_len, run.limits.max_model_len
    query = _longest_query(run)
    if context + query > length:
        yield UnsupportedError(
            spell("limits.max_model_len"),
            f"{length} cannot hold the measured context of {context} tokens (measure.context_len) "
            f"and a query of {query}; raise it to {context + query} or lower the context",
        )


def _model_has_positions(run: RunConfig, model: ModelConfig) -> Iterator[ConfigError]:
    if run.limits.max_model_len > model.max_positions:
        yield UnsupportedError(
            spell("limits.max_model_len"),
            f"{run.limits.max_model_len} is above the {model.max_positions} positions of "
            f"{model.name}; lower it",
        )


def _longest_query(run: RunConfig) -> int:
    """The longest query of a measured key: its tokens shared evenly among its requests."""
    if run.capture.policy.mixed_mode is not RuntimeMode.FULL:
        return 1
    if run.capture.sizes is None:
        return 2
    widest = min(max(run.capture.sizes, default=1), run.limits.max_num_batched_tokens)
    return -(-widest // run.limits.max_num_seqs)


_RULES: tuple[Rule, ...] = (
    _dbo_needs_experts,
    _thresholds_fill_microbatches,
    _block_size_is_power_of_two,
    _sizes_are_given,
    _model_has_positions,
    _measured_context_fits,
)
