"""A run as a person reads it: the capture table of ten seconds, and the whole report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from cgprof.record.graph import GraphRecord, StageStats
from cgprof.record.types import RankRecord, RunRecord
from cgprof.report.alone import alone_table, eager_work_table
from cgprof.report.captures import captures_table, partial_line
from cgprof.report.check import check_blocks, keys_table
from cgprof.report.document import Block, Document, Lines
from cgprof.report.estimates import estimate_lines, estimate_warnings, estimates_table
from cgprof.report.findings import findings_blocks, findings_table
from cgprof.report.headline import (
    headline_lines,
    key_memory_bytes,
    measured_lines,
    policy_line,
    recorder_line,
)
from cgprof.report.launch_model import launch_fit_table, launch_model_table
from cgprof.report.launches import launches_table
from cgprof.report.layout import Cell, Plain, Table, one_line, ratio
from cgprof.report.memory import memory_table, totals_table
from cgprof.report.memory_sum import memory_sum_table
from cgprof.report.overlap import overlap_table
from cgprof.report.parity import key_verdict, legs_table
from cgprof.report.ranks import rank_tables, veto_line
from cgprof.report.scores import scores_table, verdicts_table
from cgprof.report.sections import graphs_table, plan_table, remarks_table
from cgprof.report.stages import stages_table
from cgprof.report.worth import worth_lines, worth_table
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
    "remark": "remark",
}
_OPTIONAL = frozenset({"remark"})
_NOISY = "noisy"
_DEVICE_ONLY = frozenset(
    {"alone", "launch-model", "launch-fit", "overlap", "eager-work", "estimates"}
)
_NO_DEVICE = "recorder tape: this is measured on a CUDA device only"
_LEGEND = (
    "key: FULL-64x64q1-mb2 is graph mode-tokens x requests, q tokens a request (none: any "
    "lengths), mb microbatches (none: a plain key)"
)


def capture_document(record: RunRecord) -> Document:
    """Returns one line a key, then graph memory and how each number was measured."""
    return Document(
        blocks=_capture_blocks(record), tables=_captured_tables(record), data=_data_of(record)
    )


def report_document(records: Sequence[RunRecord]) -> Document:
    """Returns everything that one or more runs recorded."""
    datas = [_data_of(record) for record in records]
    return Document(
        blocks=[block for record in records for block in _report_blocks(record)],
        tables=[table for record in records for table in _report_tables(record)],
        data=lambda: datas[0]() if len(datas) == 1 else [data() for data in datas],
    )


def captured(record: RunRecord, rank: RankRecord) -> Table:
    """Returns the capture table of one rank; a failed key stays in its place, with its reason."""
    return Table(
        name="keys",
        title=f"rank {rank.rank}" if len(record.ranks) > 1 else "",
        columns=_COLUMNS,
        rows=tuple(_captured_row(record, graph) for graph in rank.graphs),
        tags={"run": record.run_id, "rank": rank.rank},
        optional=_OPTIONAL,
    )


def _data_of(record: RunRecord) -> Callable[[], object]:
    return lambda: record.model_dump(mode="json")


def _captured_tables(record: RunRecord) -> list[Table]:
    return [captured(record, rank) for rank in record.ranks or (RankRecord(),)]


def _capture_blocks(record: RunRecord) -> list[Block]:
    tables: list[Block] = list(_captured_tables(record)) if record.ranks else []
    footer = [
        line
        for line in (
            veto_line(record),
            policy_line(record),
            partial_line(record),
            _LEGEND,
            _noisy_line(record),
        )
        if line
    ]
    memory = [*headline_lines(record), *estimate_lines(record), *_left_out_lines(record)]
    lines = [*memory, *worth_lines(record), *footer, *measured_lines(record)]
    worth = [] if record.worth is None else [worth_table(record)]
    return [*(tables or [Lines(lines=["no key captured"])]), *worth, Lines(lines=lines)]


def _left_out_lines(record: RunRecord) -> list[str]:
    return [
        f"rank {rank.rank}: {label} {one_line(reason)}"
        for rank in record.ranks
        for label, reason in rank.left_out.items()
    ]


def _report_blocks(record: RunRecord) -> list[Block]:
    details = [
        table
        for rank in record.ranks
        for table in (*_details(rank), *filter(_has_rows, _measured(record, rank)))
    ]
    return [
        Lines(lines=_header_lines(record)),
        *findings_blocks(record),
        plan_table(record.plan),
        *_capture_blocks(record),
        *(check_blocks(record) if record.check is not None else []),
        *(rank_tables(record) if len(record.ranks) > 1 else ()),
        *details,
        *(_accuracy(record) if record.accuracy else []),
        _explained(record, estimates_table(record)),
        Lines(title="warnings", lines=[*_warnings(record), *estimate_warnings(record)]),
        Lines(title="failures", lines=_failures(record)),
        Lines(title="notes", lines=[one_line(note) for note in _notes(record)]),
    ]


def _report_tables(record: RunRecord) -> list[Table]:
    """Every table under its name, also those that a report leaves out for want of rows."""
    run: dict[str, Plain] = {"run": record.run_id}
    tables = _captured_tables(record)
    for rank in record.ranks or (RankRecord(),):
        tags = {**run, "rank": rank.rank}
        of_rank = (*_details(rank), *_measured(record, rank), remarks_table(rank))
        whose = f", rank {rank.rank}" if len(record.ranks) > 1 else ""
        tables += [replace(table, tags=tags, title=table.title + whose) for table in of_rank]
    of_run = [
        findings_table(record),
        estimates_table(record),
        plan_table(record.plan),
        keys_table(record),
        *_accuracy(record),
    ]
    of_run += [worth_table(record), *rank_tables(record)]
    tables += [replace(table, tags={**run, **table.tags}) for table in of_run]
    return [_explained(record, table) for table in tables]


def _explained(record: RunRecord, table: Table) -> Table:
    """Says why a table has no rows where a tape has nothing that could fill it."""
    if record.recorder == "cuda" or table.rows or table.name not in _DEVICE_ONLY:
        return table
    return replace(table, notes=(*table.notes, _NO_DEVICE))


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
        _remark(graph),
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


def _details(rank: RankRecord) -> tuple[Table, ...]:
    return (
        legs_table(rank.graphs),
        stages_table(rank),
        memory_table(rank),
        totals_table(rank),
        graphs_table(rank),
        captures_table(rank),
    )


def _notes(record: RunRecord) -> list[str]:
    of_ranks = dict.fromkeys(note for rank in record.ranks for note in rank.notes)
    return [*record.notes, *of_ranks]


def _measured(record: RunRecord, rank: RankRecord) -> tuple[Table, ...]:
    """What was measured beside the times of steps; older and shorter runs lack some of it."""
    return (
        memory_sum_table(rank),
        alone_table(rank),
        launches_table(rank, record.recorder),
        launch_model_table(rank),
        launch_fit_table(rank),
        overlap_table(rank),
        eager_work_table(rank),
    )


def _has_rows(table: Table) -> bool:
    return bool(table.rows)


def _accuracy(record: RunRecord) -> tuple[Table, ...]:
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
    if record.capture_error_mode is not None:
        facts["capture error mode"] = record.capture_error_mode
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
