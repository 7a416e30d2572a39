"""`cgprof plan`: what would be captured, without a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from cgprof.cli import options
from cgprof.errors import ConfigError
from cgprof.report.formats import OutputFormat

if TYPE_CHECKING:
    from cgprof.config.schema import ModelConfig, RunConfig
    from cgprof.graphs.modes import ResolvedPolicy
    from cgprof.graphs.plan import CapturePlan
    from cgprof.report.document import Document
    from cgprof.report.layout import Table
    from cgprof.shapes import GraphKey

_SHORTEST_RUN = 4  # numbers that are shortened to a range
_MOST_NAMES = 4  # skipped keys that are named one by one
_FOUND = 1
_MUCH_PADDING = 2  # times its requests that the default sizes never pad a decode batch to
_ESTIMATED = ("estimated_nodes", "estimated_node_bytes", "estimated_pool_bytes")

Explain = Annotated[
    bool,
    typer.Option("--explain", help="Print what ranks with the loads of --dp-tokens decide, why."),
]
Search = Annotated[
    bool,
    typer.Option(
        "--search",
        help="Look for loads on which ranks differ or a microbatch is empty; exit 1 if found.",
    ),
]
DpTokens = Annotated[
    list[str] | None,
    typer.Option("--dp-tokens", metavar="64,128", help="Decode tokens of each rank; 0 is idle."),
]
DpQueryLens = Annotated[
    list[str] | None,
    typer.Option("--dp-query-lens", metavar="1,1", help="Their tokens a request; by default 1."),
]
DpPrefillTokens = Annotated[
    list[str] | None,
    typer.Option("--dp-prefill-tokens", metavar="0,512", help="A prompt chunk besides."),
]


def plan(
    ctx: typer.Context,
    config: options.Config = None,
    model: options.Model = None,
    mode: options.Mode = None,
    cudagraph_capture_sizes: options.CaptureSizes = None,
    max_cudagraph_capture_size: options.MaxCaptureSize = None,
    strict: options.Strict = None,
    max_graph_memory: options.MaxGraphMemory = None,
    dbo: options.Dbo = None,
    ubatch_size: options.UbatchSize = None,
    dbo_decode_token_threshold: options.DecodeThreshold = None,
    dbo_prefill_token_threshold: options.PrefillThreshold = None,
    twins: options.Twins = None,
    dbo_spread_real_tokens: options.SpreadRealTokens = None,
    data_parallel_size: options.DataParallelSize = None,
    all2all_backend: options.All2AllBackend = None,
    verify_decisions: options.VerifyDecisions = None,
    nccl_graph_mixing: options.NcclGraphMixing = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    max_model_len: options.MaxModelLen = None,
    block_size: options.BlockSize = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = None,
    num_gpu_blocks_override: options.NumGpuBlocksOverride = None,
    dtype: options.Dtype = None,
    load_format: options.LoadFormat = None,
    device: options.Device = None,
    seed: options.Seed = None,
    parity: options.Parity = None,
    assignments: options.Assignments = None,
    explain: Explain = False,
    dp_tokens: DpTokens = None,
    dp_query_lens: DpQueryLens = None,
    dp_prefill_tokens: DpPrefillTokens = None,
    search: Search = False,
    table: options.TableName = None,
    output_format: options.Format = OutputFormat.TEXT,
) -> None:
    """Print which graphs a run captures, which it skips and why; needs no device.

    --explain and --search ask the rule by which ranks decide, for any number of ranks.

    Tables: keys, skipped; of --explain: votes; of --search: loads.
    """
    if explain and search:
        raise ConfigError("--explain, --search", "are two questions; give one of them")
    if not explain and (dp_tokens or dp_query_lens or dp_prefill_tokens):
        raise ConfigError("--dp-tokens", "describes loads for --explain; add it")
    if explain:
        _print_explanation(ctx.params, output_format, table)
        return
    if search:
        _print_search(ctx.params, output_format, table)
        return

    from cgprof.graphs.plan_record import resolve_plan

    run, card = options.load_options(ctx.params)
    policy, made = resolve_plan(run, card)
    options.emit(plan_document(run, card, policy, made), output_format, table)


def _print_explanation(
    params: Mapping[str, object], output_format: OutputFormat, table: str | None
) -> None:
    from cgprof.cli.plan_loads import explain_document, load_shapes, planned

    run, made = planned(params)
    options.emit(explain_document(run, made, load_shapes(params, run)), output_format, table)


def _print_search(
    params: Mapping[str, object], output_format: OutputFormat, table: str | None
) -> None:
    from cgprof.cli.plan_loads import planned, search_document
    from cgprof.graphs.search import search

    run, made = planned(params)
    ranks = run.parallel.data_parallel_size
    result = search(made.keys, run.limits, run.microbatch, num_ranks=ranks, seed=run.seed)
    options.emit(search_document(run, made, result), output_format, table)
    if result.finding is not None:
        raise typer.Exit(_FOUND)


def plan_document(
    run: RunConfig, model: ModelConfig, policy: ResolvedPolicy, made: CapturePlan
) -> Document:
    """Returns a plan: lines for people, its keys and what was skipped for programs."""
    from cgprof.report.document import Document, Lines

    return Document(
        blocks=[Lines(lines=plan_lines(run, model, policy, made))],
        tables=[_keys_table(run, model, made), _skipped_table(made)],
        data=lambda: _data(run, model, policy, made),
    )


def plan_lines(
    run: RunConfig, model: ModelConfig, policy: ResolvedPolicy, made: CapturePlan
) -> list[str]:
    """Returns a plan as a person reads it."""
    from cgprof.graphs.estimate import estimate_plan
    from cgprof.graphs.explain import worst_padding
    from cgprof.report.estimates import plan_estimate_line
    from cgprof.units import format_ranges

    experts = f"{model.num_experts} experts" if model.is_moe else "dense"
    lines = [
        f"model    {model.name} ({model.family}, {model.num_layers} layers, {experts}, "
        f"{model.dtype})",
        f"policy   {policy.policy.value}"
        + (f" (asked for {policy.requested.value}: {policy.reason})" if policy.reason else ""),
        f"limits   {run.limits.max_num_seqs} requests, {run.limits.max_num_batched_tokens} tokens "
        f"a step, {run.limits.max_model_len} positions",
    ]
    if run.microbatch.enabled:
        lines.append(
            f"dbo      {run.microbatch.num_microbatches} microbatches, decode from "
            f"{run.microbatch.decode_token_threshold} tokens, other steps from "
            f"{run.microbatch.prefill_token_threshold}, twins {run.microbatch.twins.value}"
            + (", few tokens spread" if run.microbatch.spread_real_tokens else "")
        )
    lines += [
        f"{len(made.plain)} plain keys, {len(made.twins)} twins",
        f"plain    {compact([key.num_tokens for key in made.plain]) or '-'}",
        f"twins    {compact([key.num_tokens for key in made.twins]) or '-'}",
    ]
    if made.keys:
        lines.append(plan_estimate_line(estimate_plan(model, run, made.keys)))
    lines += _skipped_lines(made)
    if made.uncovered_batches:
        batches = format_ranges(made.uncovered_batches)
        lines.append(f"decode batches {batches} have no graph and run eager")
    elif made.keys:
        lines.append(f"every decode batch of 1-{run.limits.max_num_seqs} requests has a graph")
    worst = worst_padding(made.keys, run.limits.max_num_seqs, run.microbatch)
    if worst is not None and worst[1] > _MUCH_PADDING * worst[0]:
        lines.append(
            f"worst padding: a batch of {worst[0]} runs as {worst[1]} tokens "
            f"(x{worst[1] / worst[0]:.3g}); more sizes narrow it"
        )
    return lines


def _skipped_lines(made: CapturePlan) -> list[str]:
    """What was skipped, the keys of one cause in one line, twins apart from plain keys."""
    by_cause: dict[tuple[str, bool], list[GraphKey]] = {}
    for skipped in made.skipped:
        is_cut_twin = bool(skipped.cause) and skipped.key.is_twin
        by_cause.setdefault((skipped.cause or skipped.reason, is_cut_twin), []).append(skipped.key)
    return [
        f"skipped  {_some(keys, 'twins' if is_cut_twin else 'keys')}: {cause}"
        for (cause, is_cut_twin), keys in by_cause.items()
    ]


def _keys_table(run: RunConfig, model: ModelConfig, made: CapturePlan) -> Table:
    """The planned keys in capture order, each with its estimate."""
    from cgprof.report.layout import Table

    facts = ("num_tokens", "num_reqs", "uniform_query_len", "num_microbatches")
    columns = ("key", "mode", *facts, *_ESTIMATED)
    return Table(
        name="keys",
        title="planned keys",
        columns={name: name.replace("num_", "").replace("_", " ") for name in columns},
        rows=tuple(
            (
                str(key),
                key.mode.name,
                *(getattr(key, name) for name in facts),
                *_estimate(run, model, key),
            )
            for key in made.keys
        ),
    )


def _estimate(run: RunConfig, model: ModelConfig, key: GraphKey) -> tuple[int, int, int]:
    """The values of `_ESTIMATED`; a pool is what the key alone would need of the shared one."""
    from cgprof.graphs.estimate import estimate_graph_memory

    found = estimate_graph_memory(model, run, key)
    return found.num_nodes, found.node_bytes, found.pool_bytes


def _skipped_table(made: CapturePlan) -> Table:
    from cgprof.report.layout import Table

    return Table(
        name="skipped",
        title="skipped keys",
        columns={"key": "key", "reason": "reason"},
        rows=tuple((str(skipped.key), skipped.reason) for skipped in made.skipped),
    )


def _data(
    run: RunConfig, model: ModelConfig, policy: ResolvedPolicy, made: CapturePlan
) -> dict[str, object]:
    """A plan and the config it follows from, for programs."""
    from cgprof.config.load import fingerprint
    from cgprof.graphs.estimate import estimate_plan
    from cgprof.graphs.plan_record import plan_record

    estimate = estimate_plan(model, run, made.keys)
    return {
        "keys": [
            dataclasses.asdict(key) | dict(zip(_ESTIMATED, _estimate(run, model, key), strict=True))
            for key in made.keys
        ],
        "estimate": dataclasses.asdict(estimate) | {"total_bytes": estimate.total_bytes},
        "num_plain": len(made.plain),
        "num_twins": len(made.twins),
        "plan": plan_record(policy, made).model_dump(mode="json"),
        "config": run.model_dump(mode="json"),
        "config_fingerprint": fingerprint(run, model),
        "model": model.model_dump(mode="json"),
    }


def _some(keys: Sequence[GraphKey], word: str) -> str:
    if len(keys) <= _MOST_NAMES:
        return ", ".join(map(str, keys))
    return f"{len(keys)} {word} of {compact([key.num_tokens for key in keys])} tokens"


def compact(numbers: Sequence[int]) -> str:
    """Returns sorted numbers with each run of at least four even steps as 'first-last by step'."""
    rest = sorted(set(numbers))
    parts = []
    while rest:
        step = rest[1] - rest[0] if len(rest) > 1 else 1
        length = 1
        while length < len(rest) and rest[length] - rest[length - 1] == step:
            length += 1
        if length < _SHORTEST_RUN:
            length = 1
            parts.append(str(rest[0]))
        else:
            by = "" if step == 1 else f" by {step}"
            parts.append(f"{rest[0]}-{rest[length - 1]}{by}")
        rest = rest[length:]
    return ", ".join(parts)
