"""`cgprof capture`: capture the plan, replay it, measure, check parity, and keep a run folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cgprof.cli import options
from cgprof.cli.options import OutputFormat

if TYPE_CHECKING:
    from cgprof.record.types import RunRecord

_CHECK_FAILED = 1
_CAPTURE_FAILED = 3

Force = Annotated[
    bool, typer.Option("--force", "-f", help="Overwrite an earlier run in that folder.")
]


def capture(
    ctx: typer.Context,
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
    parity: options.Parity = None,
    assignments: options.Assignments = None,
    output_dir: options.OutputDir = None,
    force: Force = False,
    output_format: options.Format = OutputFormat.TEXT,
) -> None:
    """Capture graphs, replay them, and report launch time, graph memory and parity.

    Without --config and --model, runs a tiny mixture of experts that any machine can.
    """
    run, card = options.load_options(ctx.params)

    from cgprof.report.tables import capture_table
    from cgprof.run import capture_run

    folder, record = capture_run(
        run,
        card,
        output_dir=output_dir,
        force=force,
        progress=lambda line: typer.echo(line, err=True),
    )
    if output_format is OutputFormat.JSON:
        typer.echo(record.model_dump_json(indent=2))
    else:
        typer.echo(capture_table(record))
    typer.echo(f"run folder: {folder}", err=True)
    raise typer.Exit(exit_code(record))


def exit_code(record: RunRecord) -> int:
    """Returns 3 for a key that could not be captured, 1 for failed parity or accuracy, else 0."""
    graphs = [graph for rank in record.ranks for graph in rank.graphs]
    if record.failures or any(graph.failure is not None for graph in graphs):
        return _CAPTURE_FAILED
    if any(leg.passed is False for graph in graphs for leg in graph.parity):
        return _CHECK_FAILED
    if any(verdict.verdict == "different" for verdict in record.verdicts):
        return _CHECK_FAILED
    return 0
