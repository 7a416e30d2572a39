"""`cgprof capture`: capture the plan, replay it, measure, check parity, and keep a run folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cgprof.cli import options
from cgprof.cli.ranks import exit_code_of, own_rank
from cgprof.errors import ConfigError
from cgprof.report.formats import OutputFormat

if TYPE_CHECKING:
    from cgprof.parallel.grid import Rank
    from cgprof.record.types import RunRecord

_CHECK_FAILED = 1
_CAPTURE_FAILED = 3

Force = Annotated[
    bool, typer.Option("--force", "-f", help="Overwrite an earlier run in that folder.")
]
Resume = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        metavar="RUN",
        help="Go on with a run that was cut off or failed, in its folder and with its settings.",
        show_default=False,
    ),
]
# Parameters that say nothing of what is captured and how.
_NO_SETTINGS = frozenset({"resume", "output_dir", "force", "output_format"})


def capture(
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
    dbo_worth: options.DboWorth = None,
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
    output_dir: options.OutputDir = None,
    force: Force = False,
    resume: Resume = None,
    output_format: options.Format = OutputFormat.TEXT,
) -> None:
    """Capture graphs, replay them, and report launch time, graph memory and parity.

    Without --config and --model, runs a tiny mixture of experts that any machine can.

    A run that is killed or interrupted leaves a folder that says partial. --resume captures its
    graphs again and reads their memory in the new process, and keeps the timings, parity and
    accuracy that were finished, each with the id of the process that measured it. Config, model,
    plan, cgprof, libraries and device must be what they were.
    """
    rank: Rank | None = None
    folder: Path | None

    def say(line: str) -> None:
        if rank is None or not rank.rank:
            typer.echo(line, err=True)

    if resume is not None:
        _refuse_beside_resume(output_dir, force)
        asked = options.load_options(ctx.params) if _has_settings(ctx.params) else None

        from cgprof.run import resume_run

        resumed = resume_run(resume, asked, progress=say)
        if resumed is None:
            say(f"nothing to resume: {resume} is complete; cgprof report shows it")
            return
        folder, record = resume, resumed
    else:
        run, card = options.load_options(ctx.params)
        rank = own_rank(run)

        from cgprof.run import capture_run

        folder, record = capture_run(
            run, card, output_dir=output_dir, force=force, progress=say, rank=rank
        )

    if folder is not None:
        from cgprof.report.tables import capture_document

        options.emit(capture_document(record), output_format)
        say(f"run folder: {folder}")
    raise typer.Exit(exit_code_of(rank, exit_code(record)))


def _has_settings(params: Mapping[str, object]) -> bool:
    given = {name for name, value in params.items() if value not in (None, [], ())}
    return bool(given - _NO_SETTINGS)


def _refuse_beside_resume(output_dir: Path | None, force: bool) -> None:
    if output_dir is not None:
        problem = "names the folder of a new run; --resume already names the one to go on in"
        raise ConfigError("--output-dir", problem)
    if force:
        raise ConfigError("--force", "overwrites a run, --resume goes on with it; give one of them")


def exit_code(record: RunRecord) -> int:
    """Returns 3 for a key that could not be captured, 1 for failed parity or accuracy, else 0.

    A key left out by measured memory counts as one of the first kind where the run is strict.
    """
    if record.config.capture.strict and any(rank.left_out for rank in record.ranks):
        return _CAPTURE_FAILED
    graphs = [graph for rank in record.ranks for graph in rank.graphs]
    if record.failures or any(graph.failure is not None for graph in graphs):
        return _CAPTURE_FAILED
    if any(leg.passed is False for graph in graphs for leg in graph.parity):
        return _CHECK_FAILED
    if any(verdict.verdict == "different" for verdict in record.verdicts):
        return _CHECK_FAILED
    return 0
