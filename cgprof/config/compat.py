"""Combinations that are refused before anything is built, each with its reason and the way out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cgprof.config.flags import spell
from cgprof.config.schema import All2AllBackend, ModelConfig, RunConfig
from cgprof.errors import ConfigError, UnsupportedError
from cgprof.shapes import CapturePolicy, RuntimeMode

_WITH_CAPACITY = (All2AllBackend.ALL_TO_ALL, All2AllBackend.SYMMETRIC_MEMORY)

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


def _worth_needs_dbo(run: RunConfig, model: ModelConfig) -> Iterator[ConfigError]:
    if run.microbatch.worth and not run.microbatch.enabled:
        yield UnsupportedError(
            spell("microbatch.worth"),
            "compares steps plain and split, but nothing is split here; add --dbo",
        )


def _captured_exchange_needs_no_host(run: RunConfig, model: ModelConfig) -> Iterator[ConfigError]:
    backend, policy = run.parallel.all2all_backend, run.capture.policy
    if backend is All2AllBackend.EXACT and policy is not CapturePolicy.NONE:
        fixed = " or ".join(other.value for other in All2AllBackend if other is not backend)
        yield UnsupportedError(
            spell("parallel.all2all_backend"),
            f"{backend.value} cannot be captured, and --mode {policy.value} captures: the host "
            "waits for the number of tokens that each rank gets (host sync), which a graph cannot "
            f"hold; use {fixed}, or --mode none",
        )


def _peer_writes_need_gpus(run: RunConfig, model: ModelConfig) -> Iterator[ConfigError]:
    backend, several = run.parallel.all2all_backend, run.parallel.data_parallel_size > 1
    on_cpu = run.measure.device == "cpu"
    if several and on_cpu and model.is_moe and backend is All2AllBackend.SYMMETRIC_MEMORY:
        yield UnsupportedError(
            spell("parallel.all2all_backend"),
            f"{backend.value} writes into the memory of other GPUs of the host, and --device cpu "
            f"has none; use {All2AllBackend.ALL_TO_ALL.value}, or another --device",
        )


def _capacity_holds_a_step(run: RunConfig, model: ModelConfig) -> Iterator[ConfigError]:
    parallel, needs = run.parallel, run.limits.max_num_batched_tokens
    capacity = parallel.dispatch_capacity
    could_drop = (
        model.is_moe
        and parallel.data_parallel_size > 1
        and parallel.all2all_backend in _WITH_CAPACITY
    )
    if could_drop and capacity is not None and capacity < needs and not parallel.drop_over_capacity:
        yield UnsupportedError(
            spell("parallel.dispatch_capacity"),
            f"a step may send all of its {needs} tokens (--max-num-batched-tokens) to one rank: "
            f"needs {needs}, have {capacity}; raise it, leave it out, or accept that tokens are "
            "dropped with --set parallel.drop_over_capacity=true",
        )


def _ranks_share_experts(run: RunConfig, model: ModelConfig) -> Iterator[ConfigError]:
    size = run.parallel.data_parallel_size
    if size > 1 and not model.is_moe:
        yield UnsupportedError(
            spell("parallel.data_parallel_size"),
            f"{size} ranks share the experts of a model, and there are no experts in this config "
            f"({model.name}); run it on one rank",
        )
    elif size > max(model.num_experts, 1):
        yield UnsupportedError(
            spell("parallel.data_parallel_size"),
            f"{size} ranks cannot share the {model.num_experts} experts of {model.name}, each "
            f"needs one; use at most {model.num_experts}",
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


def _block_fits_length(run: RunConfig, model: ModelConfig) -> Iterator[ConfigError]:
    size, length = run.limits.block_size, run.limits.max_model_len
    if size > length:
        yield UnsupportedError(
            spell("limits.block_size"),
            f"{size} is above max_model_len {length}; lower it",
        )


def _blocks_hold_requests(run: RunConfig, model: ModelConfig) -> Iterator[ConfigError]:
    limits, blocks = run.limits, run.limits.num_gpu_blocks_override
    if blocks is None:
        return
    for what, needed in blocks_needed(run).items():
        if blocks < needed:
            yield UnsupportedError(
                spell("limits.num_gpu_blocks_override"),
                f"{blocks} blocks of {limits.block_size} tokens are too few for {what}: with the "
                f"reserved block 0 they need {needed}; raise it or leave it out",
            )


def blocks_needed(run: RunConfig) -> dict[str, int]:
    """Returns the fewest KV blocks of a run, by what needs them; the reserved one included."""
    limits = run.limits
    needs = {f"one request of max_model_len {limits.max_model_len}": (1, limits.max_model_len)}
    if run.capture.policy is not CapturePolicy.NONE:
        length = run.measure.context_len + _longest_query(run)
        what = f"the profile's {limits.max_num_seqs} requests (--max-num-seqs) of {length} tokens"
        needs[what] = (limits.max_num_seqs, length)
    return {
        what: 1 + num_reqs * -(-length // limits.block_size)
        for what, (num_reqs, length) in needs.items()
    }


def _samples_are_a_range(run: RunConfig, model: ModelConfig) -> Iterator[ConfigError]:
    least, most = run.measure.min_samples, run.measure.max_samples
    if least > most:
        yield UnsupportedError(
            spell("measure.min_samples"),
            f"{least} is above measure.max_samples {most}; lower it or raise the other",
        )


def _longest_query(run: RunConfig) -> int:
    """The longest query of a measured key: its tokens shared evenly among its requests."""
    if run.capture.policy.mixed_mode is not RuntimeMode.FULL:
        return 1
    most = run.limits.max_num_batched_tokens
    if run.capture.sizes is None:
        return max(2, -(-min(run.capture.max_size or 1, most) // run.limits.max_num_seqs))
    widest = min(max(run.capture.sizes, default=1), most)
    return -(-widest // run.limits.max_num_seqs)


_RULES: tuple[Rule, ...] = (
    _captured_exchange_needs_no_host,
    _peer_writes_need_gpus,
    _capacity_holds_a_step,
    _ranks_share_experts,
    _dbo_needs_experts,
    _worth_needs_dbo,
    _thresholds_fill_microbatches,
    _block_size_is_power_of_two,
    _block_fits_length,
    _samples_are_a_range,
    _sizes_are_given,
    _model_has_positions,
    _measured_context_fits,
    _blocks_hold_requests,
)
