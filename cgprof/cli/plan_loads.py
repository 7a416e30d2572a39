"""What `cgprof plan` prints of loads: one explained, or a search over many. Builds nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cgprof.config.flags import spell
from cgprof.errors import ConfigError

if TYPE_CHECKING:
    from cgprof.config.schema import RunConfig
    from cgprof.graphs.explain import RankVote
    from cgprof.graphs.plan import CapturePlan
    from cgprof.graphs.search import LoadSpace, SearchResult
    from cgprof.report.document import Document
    from cgprof.report.layout import Table
    from cgprof.shapes import BatchShape, StepDecision

_TOKENS, _QUERY_LENS, _PREFILL = "--dp-tokens", "--dp-query-lens", "--dp-prefill-tokens"
_LOADS = (_TOKENS, _QUERY_LENS, _PREFILL)


def planned(params: Mapping[str, object]) -> tuple[RunConfig, CapturePlan]:
    """Returns run and plan of a command's parameters for any number of ranks: none is started.

    Raises:
        ConfigError: A setting is unknown or wrong, alone or beside another.
    """
    from cgprof.cli.options import read_options
    from cgprof.config.compat import check
    from cgprof.graphs.plan_record import resolve_plan

    run, card = read_options(params)
    check(_on_one_rank(run), card)
    return run, resolve_plan(run, card)[1]


def load_shapes(params: Mapping[str, object], run: RunConfig) -> list[BatchShape]:
    """Returns each rank's batch, as the options of --explain describe it.

    Raises:
        ConfigError: Tokens are missing, the options disagree, or no step can be so large.
    """
    from cgprof.graphs.explain import load_shape

    given = {name: _counts(params, name) for name in _LOADS}
    tokens = given[_TOKENS]
    if not tokens:
        raise ConfigError(_TOKENS, "gives --explain each rank's decode tokens, such as 64,128")
    ranks = run.parallel.data_parallel_size
    if ranks not in (1, len(tokens)):
        where = spell("parallel.data_parallel_size")
        raise ConfigError(_TOKENS, f"has the tokens of {len(tokens)} ranks; {where} is {ranks}")
    lengths = _one_each(_QUERY_LENS, given[_QUERY_LENS] or [1], len(tokens))
    chunks = _one_each(_PREFILL, given[_PREFILL] or [0], len(tokens))
    shapes = []
    for rank, (decode, length, chunk) in enumerate(zip(tokens, lengths, chunks, strict=True)):
        if not length or decode % length:
            problem = f"rank {rank}: {decode} tokens are no whole requests of length {length}"
            raise ConfigError(_QUERY_LENS, problem)
        shape = load_shape(decode, query_len=length, prefill_tokens=chunk)
        _check_step(rank, shape, run)
        shapes.append(shape)
    return shapes


def explain_document(run: RunConfig, made: CapturePlan, shapes: Sequence[BatchShape]) -> Document:
    """Returns the votes and the decision of ranks with these batches."""
    from cgprof.graphs.explain import explain
    from cgprof.report.document import Document, Lines

    found = explain(shapes, made.keys, run.microbatch)
    lines = [_plan_line(made), f"decision {_say(found.decision)}", f"why      {found.why}"]
    if found.why_unsplit:
        lines.append(f"no split {found.why_unsplit}")
    votes = _votes_table(found.ranks)
    return Document(
        blocks=[Lines(lines=lines), votes],
        tables=[votes],
        data=lambda: {
            "decision": _decision_data(found.decision),
            "why": found.why,
            "why_unsplit": found.why_unsplit,
            "ranks": votes.records(),
            "plan_fingerprint": made.fingerprint,
        },
    )


def search_document(run: RunConfig, made: CapturePlan, result: SearchResult) -> Document:
    """Returns what a search looked at, and the vector that it found, if any."""
    from cgprof.graphs.explain import explain
    from cgprof.graphs.search import MOST_LISTED
    from cgprof.report.document import Document, Lines

    lines = [_plan_line(made)]
    lines += [_space_line(space, run, MOST_LISTED) for space in result.spaces]
    spaces = _spaces_table(result, run.seed)
    finding = result.finding
    if finding is None:
        lines.append(
            f"looked at {result.looked_at} load vectors of {result.num_ranks} ranks: none found on "
            "which ranks would differ, a microbatch be empty or a batch not fit"
        )
        blocks: list[Lines | Table] = [Lines(lines=lines)]
    else:
        loads = ", ".join(str(shape.num_tokens) for shape in finding.shapes)
        lines += [
            f"found at load vector {result.looked_at}: [{loads}] tokens a rank",
            f"problem  {finding.problem}",
        ]
        ranks = explain(finding.shapes, made.keys, run.microbatch).ranks
        blocks = [Lines(lines=lines), _votes_table(ranks)]
    return Document(
        blocks=blocks,
        tables=[spaces],
        data=lambda: {
            "num_ranks": result.num_ranks,
            "seed": run.seed,
            "most_listed": MOST_LISTED,
            "looked_at": result.looked_at,
            "spaces": [dataclasses.asdict(space) for space in result.spaces],
            "finding": None
            if finding is None
            else {
                "problem": finding.problem,
                "shapes": [dataclasses.asdict(shape) for shape in finding.shapes],
                "decisions": [_decision_data(decision) for decision in finding.decisions],
            },
            "plan_fingerprint": made.fingerprint,
        },
    )


def _on_one_rank(run: RunConfig) -> RunConfig:
    parallel = run.parallel.model_copy(update={"data_parallel_size": 1})
    return run.model_copy(update={"parallel": parallel})


def _counts(params: Mapping[str, object], name: str) -> list[int]:
    from cgprof.cli.options import parse_counts

    value = params.get(name.lstrip("-").replace("-", "_"))
    return parse_counts([str(text) for text in value], name) if isinstance(value, list) else []


def _one_each(name: str, counts: list[int], num_ranks: int) -> list[int]:
    if len(counts) not in (1, num_ranks):
        problem = f"has {len(counts)} numbers for {num_ranks} ranks; give one, or one a rank"
        raise ConfigError(name, problem)
    return counts * num_ranks if len(counts) == 1 else counts


def _check_step(rank: int, shape: BatchShape, run: RunConfig) -> None:
    for field, found in (
        ("max_num_seqs", shape.num_reqs),
        ("max_num_batched_tokens", shape.num_tokens),
    ):
        most = getattr(run.limits, field)
        if found > most:
            problem = f"rank {rank} needs {found}, a step has at most {most}; raise it"
            raise ConfigError(spell(f"limits.{field}"), problem)


def _plan_line(made: CapturePlan) -> str:
    return (
        f"keys     {len(made.plain)} plain keys, {len(made.twins)} twins, taken as captured on all "
        "ranks"
    )


def _say(decision: StepDecision) -> str:
    return f"{decision.key} on all ranks, reason {decision.reason.value}"


def _votes_table(ranks: Sequence[RankVote]) -> Table:
    from cgprof.report.layout import Table

    return Table(
        name="votes",
        title="votes",
        columns={
            "rank": "rank",
            "num_reqs": "requests",
            "num_tokens": "tokens",
            "uniform_query_len": "query length",
            "num_prefills": "prompt chunks",
            "alone": "alone",
            "wants_split": "wants to split",
            "why_unsplit": "why not",
        },
        rows=tuple(
            (
                found.rank,
                found.vote.shape.num_reqs,
                found.vote.shape.num_tokens,
                found.vote.shape.uniform_query_len,
                found.vote.shape.num_prefills,
                "eager" if found.alone is None else str(found.alone),
                "yes" if found.vote.wants_microbatch else "no",
                found.why_unsplit or None,
            )
            for found in ranks
        ),
        optional=frozenset({"why_unsplit"}),
    )


def _spaces_table(result: SearchResult, seed: int) -> Table:
    from cgprof.report.layout import Table

    return Table(
        name="loads",
        columns={
            "loads": "loads",
            "num_ranks": "ranks",
            "looked_at": "looked at",
            "possible": "possible",
            "seed": "seed",
            "found": "found",
        },
        rows=tuple(
            (
                space.loads,
                result.num_ranks,
                space.looked_at,
                space.possible,
                None if space.is_exhaustive else seed,
                result.finding.problem if result.finding and space is result.spaces[-1] else None,
            )
            for space in result.spaces
        ),
    )


def _space_line(space: LoadSpace, run: RunConfig, most_listed: int) -> str:
    if space.is_exhaustive:
        most = run.limits.max_num_seqs
        return f"{space.loads}: {space.looked_at} of all {space.possible} of 0-{most} tokens a rank"
    of = ""
    if space.possible is not None:
        of = f" of {space.possible}, as they are more than {most_listed}"
    return f"{space.loads}: {space.looked_at} drawn with seed {run.seed}{of}"


def _decision_data(decision: StepDecision) -> dict[str, object]:
    return {
        "label": str(decision.key),
        "key": dataclasses.asdict(decision.key),
        "tokens_per_rank": list(decision.tokens_per_rank),
        "reason": decision.reason.value,
    }
