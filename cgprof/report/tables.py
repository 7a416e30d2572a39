"""A run as a person reads it: the capture table of ten seconds, and the whole report."""

from __future__ import annotations

from cgprof.record.types import GraphRecord, RankRecord, RunRecord, StageStats
from cgprof.report.check import check_text
from cgprof.report.headline import headline_lines, key_memory_bytes, measured_lines, recorder_line
from cgprof.report.layout import Cell, Table, one_line, ratio
from cgprof.report.parity import key_verdict, legs_table
from cgprof.report.scores import scores_table, verdicts_table
from cgprof.report.sections import (
    keys_table,
    memory_table,
    plan_table,
    stages_table,
    totals_table,
)
from cgprof.units import format_bytes, format_ns

_REMARK_LENGTH = 100
_COLUMNS = {
    "key": "key",
    "nodes": "nodes",
    "eager_launch_ns": "eager",
    "replay_launch_ns": "replay",
    "eager_over_replay_ratio": "eager/replay",
    "round_robin_launch_ns": "round robin",
    "device_ns": "device",
    "memory_bytes": "memory",
    "parity": "parity",
}
_REMARK = {"remark": "remark"}
_NOISY = "noisy"
_LEGEND = (
    "key: FULL-64x64q1-mb2 is graph mode-tokens x requests, q tokens a request (none: any "
    "lengths), mb microbatches (none: a plain key)"
)


def capture_table(record: RunRecord) -> str:
    """Returns one line a key, then graph memory and how each number was measured."""
    tables = [captured(record, rank).to_text() for rank in record.ranks] or ["no key captured"]
    lines = [*tables, "", *headline_lines(record)]
    missing = _missing_line(record)
    footer = [line for line in (missing, _LEGEND, _noisy_line(record)) if line]
    return "\n".join([*lines, *footer, *measured_lines(record)])


def captured(record: RunRecord, rank: RankRecord) -> Table:
    """Returns the capture table of one rank; a failed key stays in its place, with its reason."""
    rows = [_captured_row(record, graph) for graph in rank.graphs]
    remarks = [_remark(graph) for graph in rank.graphs]
    if any(remarks):
        rows = [(*row, remark) for row, remark in zip(rows, remarks, strict=True)]
    return Table(
        title=f"rank {rank.rank}" if len(record.ranks) > 1 else "",
        columns=_COLUMNS | (_REMARK if any(remarks) else {}),
        rows=tuple(rows),
    )


def report_text(record: RunRecord) -> str:
    """Returns everything a run recorded, for reading."""
    blocks = ["\n".join(_header_lines(record)), plan_table(record.plan).to_text()]
    blocks.append(capture_table(record))
    if record.check is not None:
        blocks.append(check_text(record, alone=False))
    blocks += [table.to_text() for rank in record.ranks for table in _details(rank)]
    blocks += [table.to_text() for table in _accuracy(record)]
    for title, lines in (
        ("warnings", _warnings(record)),
        ("failures", _failures(record)),
        ("notes", [one_line(note) for note in record.notes]),
    ):
        blocks.append("\n".join([title, *(lines or ["(none)"])]))
    return "\n\n".join(blocks)


def _captured_row(record: RunRecord, graph: GraphRecord) -> tuple[Cell, ...]:
    eager, hot = _launch(graph.eager), _launch(graph.replay)
    device = graph.replay.device if graph.replay else None
    return (
        graph.label,
        sum(graph.nodes.values()) if graph.nodes else None,
        eager,
        hot,
        ratio(eager, hot),
        _launch(graph.round_robin),
        device.median_ns if device else None,
        key_memory_bytes(record, graph),
        None if graph.failure else key_verdict(graph),
    )


def _launch(stages: StageStats | None) -> int | None:
    return stages.launch.median_ns if stages else None


def _remark(graph: GraphRecord) -> str | None:
    if graph.failure:
        return one_line(f"FAILED: {graph.failure}", _REMARK_LENGTH)
    kinds = [kind for kind in _warning_kinds(graph) if kind != _NOISY]
    return one_line(", ".join(kinds), _REMARK_LENGTH) or None


def _warning_kinds(graph: GraphRecord) -> list[str]:
    return list(dict.fromkeys(warning.split(":")[0] for warning in graph.warnings))


def _noisy_line(record: RunRecord) -> str:
    graphs = [graph for rank in record.ranks for graph in rank.graphs if not graph.failure]
    noisy = sum(_NOISY in _warning_kinds(graph) for graph in graphs)
    wanted = 100 * record.config.measure.relative_noise
    limit = f"quartiles of launch {wanted:g} % or more apart, or too few samples"
    return f"noisy: {noisy} of {len(graphs)} keys ({limit})" if noisy else ""


def _missing_line(record: RunRecord) -> str:
    recorded = {graph.label for rank in record.ranks for graph in rank.graphs}
    missing = [label for label in record.plan.labels if label not in recorded]
    if not missing:
        return ""
    planned = len(record.plan.labels)
    return f"run is {record.status}: {len(missing)} of {planned} planned keys not recorded"


def _details(rank: RankRecord) -> tuple[Table, ...]:
    return (
        legs_table(rank.graphs),
        stages_table(rank),
        memory_table(rank),
        totals_table(rank),
        keys_table(rank),
    )


def _accuracy(record: RunRecord) -> tuple[Table, ...]:
    """Scores and verdicts of a run that was asked for them."""
    if not record.accuracy:
        return ()
    return scores_table(record.accuracy), verdicts_table(record.verdicts)


def _header_lines(record: RunRecord) -> list[str]:
    plan, environment = record.plan, record.environment
    device = environment.device
    policy = f"{plan.requested_policy.value} requested, {plan.policy.value} effective"
    reason = f" ({one_line(plan.policy_reason)})" if plan.policy_reason else ""
    microbatch = record.config.microbatch
    facts = {
        "run": f"{record.run_id}, {record.status}, started {record.started_at}",
        "model": f"{record.model.name}, {record.model.family}, {record.model.dtype}",
        "policy": policy + reason,
        "microbatches": f"{microbatch.num_microbatches} from {microbatch.decode_token_threshold} "
        f"decode tokens, twins {microbatch.twins.value}"
        if microbatch.enabled
        else "off",
        "device": _device_text(record),
        "versions": f"cgprof {environment.cgprof}, python {environment.python}, "
        f"torch {environment.torch}, triton {environment.triton or '-'}, "
        f"cuda {environment.cuda or '-'}, driver {(device.driver if device else None) or '-'}",
        "seed": str(record.config.seed),
        "timer floor": format_ns(record.timer_floor_ns),
        "recording overhead": f"{format_ns(record.recording_overhead_ns)} a step",
    }
    facts |= {what: f"{seconds:.1f} s" for what, seconds in record.process_seconds.items()}
    return [recorder_line(record), *(f"{name}: {one_line(text)}" for name, text in facts.items())]


def _device_text(record: RunRecord) -> str:
    environment = record.environment
    host = f"{environment.cpu or 'unknown CPU'} on {environment.hostname}"
    device = environment.device
    if device is None:
        return host
    return f"{device.name}, {format_bytes(device.total_bytes)}; host {host}"


def _warnings(record: RunRecord) -> list[str]:
    """One line a kind of warning: how many keys have it, and the first of them in full."""
    kinds: dict[str, list[str]] = {}
    for rank in record.ranks:
        for graph in rank.graphs:
            for warning in graph.warnings:
                example = f"{graph.label}: {one_line(warning)}"
                kinds.setdefault(warning.split(":")[0], []).append(example)
    return [
        examples[0] if len(examples) == 1 else f"{len(examples)} like {examples[0]}"
        for examples in kinds.values()
    ]


def _failures(record: RunRecord) -> list[str]:
    keys = [
        f"{graph.label}: {one_line(graph.failure)}"
        for rank in record.ranks
        for graph in rank.graphs
        if graph.failure
    ]
    return keys + [
        one_line(f"{failure.where}: {failure.error}: {failure.message}")
        for failure in record.failures
    ]
