"""`cgprof generate`: text in, text out, through captured graphs."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from cgprof.cli import options
from cgprof.cli.options import OutputFormat

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
    dbo: options.Dbo = None,
    ubatch_size: options.UbatchSize = None,
    dbo_decode_token_threshold: options.DecodeThreshold = None,
    dbo_prefill_token_threshold: options.PrefillThreshold = None,
    twins: options.Twins = None,
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

    from cgprof.engine.generate import Sampling, generate_texts

    generation = generate_texts(
        run,
        card,
        prompt,
        Sampling(max_tokens=max_tokens, temperature=temperature, seed=run.seed),
        progress=lambda line: typer.echo(line, err=True),
    )
    if output_format is OutputFormat.JSON:
        document = dataclasses.asdict(generation)
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        for completion in generation.completions:
            typer.echo(completion.text)
    typer.echo(
        f"{generation.captured_graphs} graphs, {generation.replayed_steps} steps replayed, "
        f"{generation.eager_steps} eager",
        err=True,
    )
