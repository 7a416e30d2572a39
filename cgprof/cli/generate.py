"""`cgprof generate`: text in, text out, through captured graphs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from cgprof.cli import options
from cgprof.errors import UnsupportedError
from cgprof.report.formats import OutputFormat

if TYPE_CHECKING:
    from cgprof.engine.generate import Generation
    from cgprof.report.document import Document

Prompts = Annotated[
    list[str],
    typer.Option("--prompt", "-p", help="A text to continue; repeat it for several at once."),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Most tokens to generate.")]
Temperature = Annotated[
    float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest token.")
]


def generate(
    ctx: typer.Context,
    prompt: Prompts,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
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
    assignments: options.Assignments = None,
    output_format: options.Format = OutputFormat.TEXT,
) -> None:
    """Continue prompts with a model whose directory has a tokenizer, and print the texts.

    Graphs are captured for the batches that the prompts make; --mode none runs eager.
    """
    run, card = options.load_options(ctx.params)
    if run.parallel.data_parallel_size > 1:
        raise UnsupportedError("--data-parallel-size", "generate runs on one rank; leave it out")

    from cgprof.engine.generate import Sampling, generate_texts

    generation = generate_texts(
        run,
        card,
        prompt,
        Sampling(max_tokens=max_tokens, temperature=temperature, seed=run.seed),
        progress=lambda line: typer.echo(line, err=True),
    )
    options.emit(_document(generation), output_format)
    typer.echo(
        f"{generation.captured_graphs} graphs, {generation.replayed_steps} steps replayed, "
        f"{generation.eager_steps} eager",
        err=True,
    )


def _document(generation: Generation) -> Document:
    """The texts as they are; programs get the counts as well."""
    from cgprof.report.document import Document, Lines
    from cgprof.report.layout import Table

    names = ("prompt", "text", "prompt_tokens", "tokens", "finish_reason")
    table = Table(
        name="completions",
        columns={name: name.replace("_", " ") for name in names},
        rows=tuple(
            (one.prompt, one.text, one.prompt_tokens, len(one.token_ids), one.finish_reason)
            for one in generation.completions
        ),
    )
    return Document(
        blocks=[Lines(lines=[completion.text for completion in generation.completions])],
        tables=[table],
        data=lambda: dataclasses.asdict(generation),
    )
