"""The options that `plan` and `capture` share, and how they become overrides of a config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cgprof.config.flags import FLAGS, spell
from cgprof.errors import ConfigError
from cgprof.report.formats import OutputFormat

if TYPE_CHECKING:
    from cgprof.config.schema import ModelConfig, RunConfig
    from cgprof.report.document import Document


Format = Annotated[
    OutputFormat,
    typer.Option(
        "--format", help="text and md are for people; json and csv for programs: ns and bytes."
    ),
]
TableName = Annotated[
    str | None,
    typer.Option("--table", metavar="NAME", help="Print one table alone; csv has the first else."),
]
OutputDir = Annotated[
    Path | None, typer.Option("--output-dir", "-o", help="The run folder.", show_default=False)
]

Config = Annotated[
    str | None,
    typer.Option("--config", metavar="PATH|NAME", help="A TOML run, or the name of a bundled one."),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME|PATH",
        help="A bundled model, a config.json, or a directory that has one.",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", metavar="auto|float32|float16|bfloat16", help="Model dtype."),
]
LoadFormat = Annotated[
    str | None,
    typer.Option(
        "--load-format",
        metavar="auto|dummy",
        help="auto loads the safetensors of the model's directory; dummy weights are seeded.",
    ),
]
Device = Annotated[
    str | None, typer.Option("--device", metavar="auto|cpu|cuda", help="Where the model runs.")
]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of weights, inputs and sampling.")]
Parity = Annotated[
    bool | None, typer.Option("--parity/--no-parity", help="Compare each graph with eager runs.")
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PART.FIELD=VALUE", help="Any other setting, in TOML syntax; repeatable."
    ),
]

DataParallelSize = Annotated[
    int | None,
    typer.Option(
        "--data-parallel-size", "-dp", help="Ranks; each runs requests and holds some experts."
    ),
]
All2AllBackend = Annotated[
    str | None,
    typer.Option(
        "--all2all-backend",
        metavar="allgather-reducescatter|all-to-all|symmetric-memory|exact",
        help="How tokens reach their experts' ranks; symmetric-memory needs GPUs of one host, "
        "exact the host itself, so --mode none.",
    ),
]
VerifyDecisions = Annotated[
    bool | None,
    typer.Option(
        "--verify-decisions/--no-verify-decisions",
        help="Compare every decision over the ranks before it is launched.",
    ),
]
NcclGraphMixing = Annotated[
    bool | None,
    typer.Option(
        "--nccl-graph-mixing/--no-nccl-graph-mixing",
        help="Let graphs and eager calls share a communicator; replays launch much slower.",
    ),
]

Mode = Annotated[
    str | None,
    typer.Option(
        "--mode",
        "--cudagraph-mode",
        metavar="none|full|full-decode-only|piecewise|full-and-piecewise",
        help="What to capture; vLLM's upper-case spelling is understood too.",
    ),
]
CaptureSizes = Annotated[
    list[str] | None,
    typer.Option(
        "--cudagraph-capture-sizes",
        metavar="1,2,4",
        help="Token counts to capture, instead of the default list; repeatable.",
    ),
]
MaxCaptureSize = Annotated[
    int | None, typer.Option("--max-cudagraph-capture-size", help="Largest size to capture.")
]

Strict = Annotated[
    bool | None,
    typer.Option(
        "--strict/--no-strict",
        help="Refuse a plan that lowers the mode, skips a size or leaves decode batches eager.",
    ),
]

MaxGraphMemory = Annotated[
    str | None,
    typer.Option(
        "--max-graph-memory",
        metavar="SIZE",
        help="Most memory of all keys' graphs, such as 0.5GiB; keys that do not fit are left out. "
        "Graphs that finish steps come beside it.",
    ),
]

MaxNumSeqs = Annotated[
    int | None, typer.Option("--max-num-seqs", help="Most requests in one step.")
]
MaxNumBatchedTokens = Annotated[
    int | None, typer.Option("--max-num-batched-tokens", help="Most tokens in one step.")
]
MaxModelLen = Annotated[
    int | None, typer.Option("--max-model-len", help="Longest request, prompt and answer.")
]
BlockSize = Annotated[int | None, typer.Option("--block-size", help="KV slots in a block.")]
GpuMemoryUtilization = Annotated[
    float | None,
    typer.Option("--gpu-memory-utilization", help="Share of device memory to use, up to 1."),
]
NumGpuBlocksOverride = Annotated[
    int | None,
    typer.Option("--num-gpu-blocks-override", help="KV blocks, whatever memory is free."),
]

Dbo = Annotated[
    bool | None,
    typer.Option("--dbo/--no-dbo", "--enable-dbo", help="Dual batch overlap: also capture twins."),
]
UbatchSize = Annotated[
    int | None, typer.Option("--ubatch-size", help="Microbatches of a step; turns --dbo on.")
]
DecodeThreshold = Annotated[
    int | None,
    typer.Option("--dbo-decode-token-threshold", help="Fewest tokens of a decode step to split."),
]
PrefillThreshold = Annotated[
    int | None,
    typer.Option("--dbo-prefill-token-threshold", help="Fewest tokens of any other step to split."),
]
SpreadRealTokens = Annotated[
    bool | None,
    typer.Option(
        "--dbo-spread-real-tokens/--no-dbo-spread-real-tokens",
        help="Lay few decode tokens over all microbatches, where a twin would else be refused.",
    ),
]
DboWorth = Annotated[
    bool | None,
    typer.Option(
        "--dbo-worth/--no-dbo-worth",
        help="With --dbo, also find out from which token count on a split step is faster: times "
        "decode and prefill steps plain and split, each with and without its exchange; takes "
        "about as long as profiling the same sizes again.",
    ),
]
Twins = Annotated[
    str | None,
    typer.Option("--twins", metavar="both|twin-only|band", help="Plain graphs kept beside twins."),
]


def emit(document: Document, output_format: OutputFormat, table: str | None = None) -> None:
    """Prints what a command found, in the format that was asked for.

    Raises:
        ConfigError: There is no such table.
    """
    typer.echo(document.render(output_format, table))


def load_options(params: Mapping[str, object]) -> tuple[RunConfig, ModelConfig]:
    """Returns run and model of a command's parameters, checked for combinations that are refused.

    Raises:
        ConfigError: A setting is unknown or wrong, alone or beside another.
    """
    from cgprof.config.compat import check

    run, card = read_options(params)
    check(run, card)
    return run, card


def read_options(params: Mapping[str, object]) -> tuple[RunConfig, ModelConfig]:
    """Returns run and model of a command's parameters, each setting checked by itself.

    Raises:
        ConfigError: A setting is unknown or wrong.
    """
    from cgprof.config.load import load_run

    overrides = dict(_overrides(params))
    config, model = params.get("config"), overrides.pop("model.name", None)
    return load_run(
        config if isinstance(config, str) else None,
        model if isinstance(model, str) else None,
        overrides,
        _texts(params.get("assignments")),
    )


def parse_counts(texts: Sequence[str], where: str) -> list[int]:
    """Returns the numbers of a repeated, comma-separated option; `where` is its name in errors.

    Raises:
        ConfigError: One of them is not a whole number.
    """
    counts = []
    for word in ",".join(texts).split(","):
        if not word.strip().isdecimal():
            problem = f"{word!r} is not a whole number; write several as 1,2,4"
            raise ConfigError(where, problem)
        counts.append(int(word))
    return counts


def _overrides(params: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Settings of the given flags; --ubatch-size alone turns the overlap on, as in vLLM."""
    if params.get("ubatch_size") is not None:
        yield "microbatch.enabled", True
    for path, flag in FLAGS.items():
        value = params.get(flag.lstrip("-").replace("-", "_"))
        if value in (None, [], ()):
            continue
        if path == "capture.policy":
            value = str(value).lower().replace("_", "-")
        elif path == "capture.sizes":
            value = parse_counts(_texts(value), spell(path))
        yield path, value


def _texts(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list | tuple) else []
