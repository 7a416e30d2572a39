"""`cgprof check`: are replays right? Parity of every key, greedy runs, weights, a task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cgprof.cli import options
from cgprof.cli.ranks import exit_code_of, own_rank
from cgprof.report.formats import OutputFormat

if TYPE_CHECKING:
    from cgprof.record.types import RunRecord

_CHECK_FAILED = 1
_CAPTURE_FAILED = 3
_INCONCLUSIVE = 4

Task = Annotated[
    str | None,
    typer.Option(
        "--task",
        metavar="PATH|NAME",
        help="arithmetic, or a file of JSON lines; by default arithmetic, with real weights.",
        show_default=False,
    ),
]
TaskKind = Annotated[
    Literal["generate", "likelihood", "multiple-choice"] | None,
    typer.Option("--task-kind", help="How the task is scored; by default what its rows are for."),
]
Limit = Annotated[
    int | None, typer.Option("--limit", min=1, help="Items of the task, drawn with the seed.")
]
Sample = Annotated[
    bool, typer.Option("--sample", help="Parity of a quarter of the keys only; called partial.")
]
GreedySteps = Annotated[
    int, typer.Option("--greedy-steps", metavar="N", help="Steps of the greedy run, 64 or more.")
]
Plant = Annotated[
    str | None,
    typer.Option(
        "--plant",
        metavar="FAULT",
        help="Check the check: plant a fault; exit 0 if the stated legs turn red, else 1.",
    ),
]
Force = Annotated[
    bool, typer.Option("--force", "-f", help="Overwrite an earlier run in that folder.")
]
FailOnInconclusive = Annotated[
    bool, typer.Option("--fail-on-inconclusive", help="Exit 4 when a leg has no verdict.")
]


def check(
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
    assignments: options.Assignments = None,
    task: Task = None,
    task_kind: TaskKind = None,
    limit: Limit = None,
    sample: Sample = False,
    greedy_steps: GreedySteps = 64,
    plant: Plant = None,
    output_dir: options.OutputDir = None,
    force: Force = False,
    fail_on_inconclusive: FailOnInconclusive = False,
    output_format: options.Format = OutputFormat.TEXT,
) -> None:
    """Check that replays are right: parity of each graph, greedy runs, weights, accuracy.

    Without --config and --model, checks a tiny mixture of experts that any machine can run.
    A check that was cut off leaves a partial folder and cannot be resumed: run it again.
    """
    run, card = options.load_options(ctx.params)

    from cgprof.accuracy.choice import CheckOptions
    from cgprof.report.check import check_document
    from cgprof.run import check_run

    rank = own_rank(run)

    def say(line: str) -> None:
        if rank is None or not rank.rank:
            typer.echo(line, err=True)

    folder, record = check_run(
        run,
        card,
        CheckOptions(
            task=task,
            task_kind=task_kind,
            limit=limit,
            sample=sample,
            greedy_steps=greedy_steps,
            plant=plant,
        ),
        output_dir=output_dir,
        force=force,
        progress=say,
        rank=rank,
    )
    if folder is not None:
        options.emit(check_document(record), output_format)
        say(f"run folder: {folder}")
    code = exit_code(record, fail_on_inconclusive=fail_on_inconclusive)
    raise typer.Exit(exit_code_of(rank, code))


def exit_code(record: RunRecord, *, fail_on_inconclusive: bool) -> int:
    """Returns 3 for a failed capture; with a fault 0 if it did as stated; else by the verdict."""
    from cgprof.report.check import check_verdict

    if record.failures or any(graph.failure for rank in record.ranks for graph in rank.graphs):
        return _CAPTURE_FAILED
    if record.check is not None and record.check.plant is not None:
        return 0 if record.check.plant.as_stated else _CHECK_FAILED
    word = check_verdict(record).word
    if word == "FAIL":
        return _CHECK_FAILED
    return _INCONCLUSIVE if word != "pass" and fail_on_inconclusive else 0
