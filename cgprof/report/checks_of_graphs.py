"""Checks of what graphs hold and whether a step can replay them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cgprof.graphs.guard import EMPTY, LOST, MICROBATCH_SLACK, MIN_COUNT_RATIO, doubt_of_nodes
from cgprof.graphs.reach import reaching_batch
from cgprof.record.contents import WorkDifference
from cgprof.record.graph import GraphRecord
from cgprof.record.types import RankRecord, RunRecord
from cgprof.report import needs
from cgprof.report.finding import Check, Finding
from cgprof.report.layout import Plain
from cgprof.report.memory_sum import own_growth_bytes
from cgprof.shapes import GraphKey

CAPTURED_NOTHING = "captured-nothing"
TWIN_WITHOUT_ITS_WORK = "twin-without-its-work"
PLAIN_WITHOUT_ITS_WORK = "plain-without-its-work"
WORK_NOT_EAGER = "work-not-eager"
CAPTURE_FAILED = "capture-failed"
UNREACHABLE_TWIN = "unreachable-twin"
NEVER_REPLAYED = "never-replayed"

_NO_KERNEL = "a graph has no kernel, or its capture was refused for that"
_TWIN_WORK = (
    f"a twin's kernels are {MICROBATCH_SLACK:g} microbatch or more away from those of the plain "
    "keys of a microbatch's size times the microbatches, or kernels of an eager step are missing"
)
_PLAIN_WORK = (
    f"a plain key's kernels are below {MIN_COUNT_RATIO:g} of those of the next size, or above "
    "that the other way round"
)
_NOT_EAGER = "kernels of the graph and of an eager step differ, exceptions apart"
_ANY_FAILURE = "a key was not captured, for any other reason"
_NO_BATCH = "no batch within the limits is decided to replay the twin"
_NO_STEP = "requests were served, and no step replayed the key"
_LISTED_KERNELS = 3


def captured_nothing(run: RunRecord) -> Iterator[Finding]:
    """Finds graphs without a kernel."""
    for rank in run.ranks:
        found = {label: doubt for label, doubt in _doubts(rank).items() if EMPTY in doubt}
        if found:
            yield Finding(
                name=CAPTURED_NOTHING,
                severity="fault",
                keys=tuple(found),
                evidence={"kernels": 0, "said": next(iter(found.values()))},
                threshold=_NO_KERNEL,
                way_out="run the work on the recorder's streams, and enter the recording in every "
                "thread that launches; a replay of this graph would do nothing",
                rank=rank.rank,
            )


def twin_without_its_work(run: RunRecord) -> Iterator[Finding]:
    """Finds twins that lost a microbatch, or kernels that an eager step runs."""
    for rank in run.ranks:
        doubts = _lost(rank, twins=True)
        missing = _missing_of_twins(rank, doubts)
        if doubts or missing:
            yield Finding(
                name=TWIN_WITHOUT_ITS_WORK,
                severity="fault",
                keys=(*doubts, *missing),
                evidence={
                    **({"said": next(iter(doubts.values()))} if doubts else {}),
                    **(_missing_evidence(missing) if missing else {}),
                },
                threshold=_TWIN_WORK,
                way_out="see that each microbatch's thread enters the recording and its stream "
                "joins the compute stream; check the key with cgprof check --dbo",
                rank=rank.rank,
            )


def plain_without_its_work(run: RunRecord) -> Iterator[Finding]:
    """Finds plain keys whose kernels are far from the neighbouring size's."""
    for rank in run.ranks:
        doubts = _lost(rank, twins=False)
        if doubts:
            yield Finding(
                name=PLAIN_WITHOUT_ITS_WORK,
                severity="fault",
                keys=tuple(doubts),
                evidence={"said": next(iter(doubts.values()))},
                threshold=_PLAIN_WORK,
                way_out="look for work on a stream that never forks from the recording; compare "
                "cgprof nodes RUN KEY of the two sizes",
                rank=rank.rank,
            )


def work_not_eager(run: RunRecord) -> Iterator[Finding]:
    """Finds graphs whose kernels are not those of an eager step."""
    for rank in run.ranks:
        spared = {*_doubts(rank), *_missing_of_twins(rank, {})}
        unlike = {
            label: difference
            for label, difference in rank.against_eager.items()
            if difference.equal is False and label not in spared
        }
        if unlike:
            first = next(iter(unlike.values()))
            yield Finding(
                name=WORK_NOT_EAGER,
                severity="fault",
                keys=tuple(unlike),
                evidence={
                    "missing": sum(first.missing.values()),
                    "surplus": sum(first.surplus.values()),
                    "such_as": _some_kernels({**first.missing, **first.surplus}),
                },
                threshold=_NOT_EAGER,
                way_out="see cgprof nodes RUN KEY; what is chosen by size or at the first run must "
                "be chosen alike in both, or be named as an exception",
                rank=rank.rank,
            )


def capture_failed(run: RunRecord) -> Iterator[Finding]:
    """Finds keys without a graph that no other check explains."""
    for rank in run.ranks:
        doubts = _doubts(rank)
        failed = [g for g in rank.graphs if g.failure is not None and g.label not in doubts]
        if failed:
            yield Finding(
                name=CAPTURE_FAILED,
                severity="fault",
                keys=tuple(graph.label for graph in failed),
                evidence={"said": failed[0].failure},
                threshold=_ANY_FAILURE,
                way_out="the failure says what to do; steps of these sizes run as a larger key or "
                "eagerly until then",
                rank=rank.rank,
            )


def unreachable_twin(run: RunRecord) -> Iterator[Finding]:
    """Finds twins that were captured and can never be replayed."""
    limits, config = run.config.limits, run.config.microbatch
    for rank in run.ranks:
        captured = [graph for graph in rank.graphs if graph.failure is None]
        keys = [graph.key for graph in captured]
        idle = [
            graph
            for graph in captured
            if graph.key.is_twin and reaching_batch(graph.key, keys, limits, config) is None
        ]
        if idle:
            yield Finding(
                name=UNREACHABLE_TWIN,
                severity="cost",
                keys=tuple(graph.label for graph in idle),
                evidence={
                    "max_num_seqs": limits.max_num_seqs,
                    "decode_threshold": config.decode_token_threshold,
                    "graph_memory_bytes": _growth(idle),
                },
                threshold=_NO_BATCH,
                way_out="leave these sizes out of --cudagraph-capture-sizes, or raise "
                "--max-num-seqs or lower --dbo-decode-token-threshold until batches reach them",
                rank=rank.rank,
            )


def never_replayed(run: RunRecord) -> Iterator[Finding]:
    """Finds keys that serving did not use."""
    for rank in run.ranks:
        steps = sum(decision.count for decision in rank.decisions)
        used = {decision.label for decision in rank.decisions if decision.count}
        idle = [g for g in rank.graphs if g.failure is None and g.label not in used]
        if steps and idle:
            yield Finding(
                name=NEVER_REPLAYED,
                severity="info",
                keys=tuple(graph.label for graph in idle),
                evidence={"steps_served": steps, "graph_memory_bytes": _growth(idle)},
                threshold=_NO_STEP,
                way_out="cgprof's own short trial, which says nothing of your traffic: where your "
                "batches never reach these sizes, leave them out of "
                "--cudagraph-capture-sizes",
                rank=rank.rank,
            )


GRAPH_CHECKS: Mapping[str, Check] = {
    CAPTURED_NOTHING: Check(captured_nothing, (needs.GRAPHS,)),
    TWIN_WITHOUT_ITS_WORK: Check(twin_without_its_work, (needs.TWINS,)),
    PLAIN_WITHOUT_ITS_WORK: Check(plain_without_its_work, (needs.GRAPHS,)),
    WORK_NOT_EAGER: Check(work_not_eager, (needs.DEVICE, needs.EAGER_WORK)),
    CAPTURE_FAILED: Check(capture_failed, (needs.GRAPHS,)),
    UNREACHABLE_TWIN: Check(unreachable_twin, (needs.TWINS,)),
    NEVER_REPLAYED: Check(never_replayed, (needs.STEPS,)),
}


def _doubts(rank: RankRecord) -> dict[str, str]:
    """By label, what the rule of capture says against a key; such a key is no measure of others."""
    doubts: dict[str, str] = {}
    sound: dict[GraphKey, Mapping[str, int]] = {}
    for graph in rank.graphs:
        doubt = graph.failure
        if doubt is None:
            doubt = doubt_of_nodes(graph.key, graph.nodes, sound)
            if doubt is None:
                sound[graph.key] = graph.nodes
        if doubt is not None and (EMPTY in doubt or LOST in doubt):
            doubts[graph.label] = doubt
    return doubts


def _lost(rank: RankRecord, *, twins: bool) -> dict[str, str]:
    twin_labels = {graph.label for graph in rank.graphs if graph.key.is_twin}
    return {
        label: doubt
        for label, doubt in _doubts(rank).items()
        if LOST in doubt and (label in twin_labels) is twins
    }


def _missing_of_twins(rank: RankRecord, told: Mapping[str, str]) -> dict[str, WorkDifference]:
    return {
        graph.label: difference
        for graph in rank.graphs
        if graph.key.is_twin
        and graph.label not in told
        and (difference := rank.against_eager.get(graph.label)) is not None
        and difference.equal is False
        and difference.missing
    }


def _missing_evidence(missing: Mapping[str, WorkDifference]) -> dict[str, Plain]:
    first = next(iter(missing.values()))
    return {
        "missing": sum(first.missing.values()),
        "such_as": _some_kernels(first.missing),
    }


def _some_kernels(counts: Mapping[str, int]) -> str:
    most = sorted(counts, key=lambda name: -counts[name])[:_LISTED_KERNELS]
    return ", ".join(f"{counts[name]} {name}" for name in most)


def _growth(graphs: list[GraphRecord]) -> int | None:
    known = [size for graph in graphs if (size := own_growth_bytes(graph)) is not None]
    return sum(max(size, 0) for size in known) if known else None
