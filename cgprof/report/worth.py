"""Is dual batch overlap worth it here: steps plain and split, what is hidden, and from where on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cgprof.config.schema import All2AllBackend
from cgprof.record.types import RunRecord
from cgprof.record.worth import Estimate, StepTimes, WorthRecord, WorthRow
from cgprof.report.layout import Cell, Interval, Plain, Table, format_ratio, one_line, ratio

_COLUMNS = {
    "kind": "steps of",
    "num_tokens": "tokens a rank",
    "fewest_tokens": "smallest rank",
    "plain_ns": "plain",
    "split_ns": "split",
    "speedup_interval": "plain/split",
    "verdict": "DBO is",
    "plain_bare_ns": "plain bare",
    "split_bare_ns": "split bare",
    "exchange_ns": "exchange",
    "exposed_ns": "exposed",
    "hidden": "hidden share",
    "hidden_low": "low",
    "hidden_high": "high",
    "experts_plain_ns": "experts plain",
    "experts_split_ns": "experts split",
    "experts_ratio": "growth",
    "plain_key": "plain key",
    "split_key": "split key",
    "samples": "n",
}
_OPTIONAL = frozenset(
    name
    for name in _COLUMNS
    if name.startswith(("fewest", "hidden", "experts", "ex")) or "bare" in name
)
_STAND_IN = "CPU stand-in times, never GPU times"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """How the finding of one kind of steps is put."""

    subject: str
    pays_from: str
    pays_nowhere: str
    speed: str


_OF_DBO = _Words(
    subject="DBO for {}",
    pays_from="break-even at",
    pays_nowhere="no break-even",
    speed="plain/split",
)
_OF_SPREAD = _Words(
    subject="spreading few tokens",
    pays_from="pays from",
    pays_nowhere="pays from no size on",
    speed="fall-back/spread",
)


def worth_table(record: RunRecord) -> Table:
    """Returns one row a token count, with how each number was measured.

    Title and tags say whose rows they are, and by which exchange and settings, for several runs.
    """
    worth, title, tags = record.worth, _title(record), _tags(record)
    if worth is None:
        return Table(name="worth", title=title, columns=_COLUMNS, rows=(), tags=tags)
    return Table(
        name="worth",
        title=title,
        columns=_COLUMNS,
        rows=tuple(_row(row) for row in worth.rows),
        notes=(*_measured(record, worth), *map(one_line, _left_out(worth))),
        tags=tags,
        optional=_OPTIONAL,
    )


def worth_lines(record: RunRecord) -> list[str]:
    """Returns the finding of each kind of steps, in one sentence each."""
    worth = record.worth
    if worth is None:
        return []
    stand_in = f" ({_STAND_IN})" if record.recorder == "tape" else ""
    lines = []
    for kind, words in _kinds(record, worth).items():
        rows = sorted((row for row in worth.rows if row.kind == kind), key=_size)
        subject = words.subject.format(kind)
        if not rows:
            lines.append(f"{subject}: not measured, no step of a size that can be compared")
            continue
        finding = _splitting_alone(rows) if worth.num_ranks <= 1 else _finding(rows, words)
        lines.append(f"{subject}, {_where(worth)}: {finding}{stand_in}")
    return lines


def break_even(rows: Sequence[WorthRow]) -> WorthRow | None:
    """Returns the smallest size from which on every measured size is worth it, or None."""
    found = None
    for row in sorted(rows, key=_size, reverse=True):
        if row.verdict != "worth it":
            break
        found = row
    return found


def _size(row: WorthRow) -> int:
    return row.num_tokens


def _kinds(record: RunRecord, worth: WorthRecord) -> dict[str, _Words]:
    """The kinds of steps that the run compared, or should have."""
    spreads = record.config.microbatch.spread_real_tokens and worth.num_ranks > 1
    return {"decode": _OF_DBO} | ({"spread": _OF_SPREAD} if spreads else {}) | {"prefill": _OF_DBO}


def _finding(rows: Sequence[WorthRow], words: _Words) -> str:
    span = _span(rows)
    first = break_even(rows)
    if first is not None:
        return f"{words.pays_from} {first.num_tokens} tokens a rank, {_speed(first, words)}; {span}"
    largest = rows[-1].num_tokens
    paying = [str(row.num_tokens) for row in rows if row.verdict == "worth it"]
    open_sizes = [str(row.num_tokens) for row in rows if row.verdict == "undecided"]
    still_open = f"; undecided at {', '.join(open_sizes)}" if open_sizes else ""
    best = max(rows, key=lambda row: row.speedup.value if row.speedup else 0.0)
    if paying:
        return (
            f"{words.pays_nowhere} up to {largest} tokens a rank: it pays at {', '.join(paying)} "
            f"but not up to the largest{still_open}; {span}"
        )
    return (
        f"{words.pays_nowhere} up to {largest} tokens a rank; the best is {best.num_tokens} "
        f"tokens, {_speed(best, words)}{still_open}; {span}"
    )


def _splitting_alone(rows: Sequence[WorthRow]) -> str:
    speeds = [row.speedup.value for row in rows if row.speedup]
    if not speeds:
        return "nothing to hide, the exchange is a loopback"
    low, high = format_ratio(min(speeds)), format_ratio(max(speeds))
    return (
        f"nothing to hide, the exchange is a loopback; splitting alone makes a step {low} to "
        f"{high} as fast; {_span(rows)}"
    )


def _span(rows: Sequence[WorthRow]) -> str:
    sizes = [row.num_tokens for row in rows]
    return f"measured {sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else f"measured {sizes[0]} only"


def _speed(row: WorthRow, words: _Words) -> str:
    if row.speedup is None:
        return "of unknown speed"
    speed = row.speedup
    return f"{words.speed} {format_ratio(speed.value)} [{speed.low:.2f}, {speed.high:.2f}]"


def _where(worth: WorthRecord) -> str:
    if worth.num_ranks <= 1:
        return "one rank"
    return f"{worth.exchange} over {worth.num_ranks} ranks"


def _title(record: RunRecord) -> str:
    worth, parallel = record.worth, record.config.parallel
    if worth is None:
        return f"is DBO worth it here: not measured; run {record.run_id}"
    parts = [f"is DBO worth it here: {_where(worth)}"]
    by_nccl = worth.exchange != All2AllBackend.SYMMETRIC_MEMORY.value
    if worth.num_ranks > 1 and record.recorder == "cuda" and by_nccl:
        ctas = parallel.nccl_max_ctas
        parts.append("NCCL's own CTAs" if ctas is None else f"at most {ctas} NCCL CTAs")
        parts.append(f"graph mixing {'on' if parallel.nccl_graph_mixing else 'off'}")
    return f"{', '.join(parts)}; run {record.run_id}"


def _tags(record: RunRecord) -> dict[str, Plain]:
    worth, parallel = record.worth, record.config.parallel
    return {
        "exchange": worth.exchange if worth else None,
        "num_ranks": worth.num_ranks if worth else None,
        "nccl_max_ctas": parallel.nccl_max_ctas,
        "nccl_graph_mixing": "on" if parallel.nccl_graph_mixing else "off",
    }


def _row(row: WorthRow) -> tuple[Cell, ...]:
    hidden = row.hidden
    experts = ratio(row.experts_split_ns, row.experts_plain_ns)
    return (
        row.kind,
        row.num_tokens,
        row.fewest_tokens,
        row.plain.median_ns,
        row.split.median_ns,
        _interval(row.speedup),
        row.verdict,
        _median(row.plain_bare),
        _median(row.split_bare),
        row.exchange_ns,
        row.exposed_ns,
        hidden.value if hidden else None,
        hidden.low if hidden else None,
        hidden.high if hidden else None,
        row.experts_plain_ns,
        row.experts_split_ns,
        experts,
        row.plain_label,
        row.split_label,
        row.plain.count,
    )


def _interval(estimate: Estimate | None) -> Interval | None:
    if estimate is None:
        return None
    return Interval(estimate.value, estimate.low, estimate.high)


def _median(times: StepTimes | None) -> int | None:
    return times.median_ns if times else None


def _measured(record: RunRecord, worth: WorthRecord) -> list[str]:
    slowest = ", on the slowest rank of each step" if worth.num_ranks > 1 else ""
    lines = [_STAND_IN] if record.recorder == "tape" else []
    lines += [
        "plain, split: host time of whole steps from the decision to the tokens, votes left out"
        f"{slowest}; all by turns, no profiler on; medians",
        "worth it: the 95 % bootstrap interval of plain/split lies above 1; not worth it: below 1",
        "decode: full steps of one token a request, plain graph against twin; prefill: whole "
        "prompts, eager against eager split",
    ]
    if any(row.kind == "spread" for row in worth.rows):
        lines.append(
            "spread: all ranks full but the last, which has the most tokens that leave its last "
            "microbatch empty; plain is what such a step falls back to, split the twin with those "
            "tokens spread over its microbatches"
        )
    if any(row.plain_bare for row in worth.rows):
        lines.append(
            "bare: the same without its collectives, all else unchanged, each layer's experts told "
            "what its exchange brought before; exchange = plain - plain bare, exposed = split - "
            "split bare, hidden share = 1 - exposed / exchange, with its 95 % interval"
        )
    hidden = [row.hidden for row in worth.rows if row.hidden is not None]
    if any(share.low > 1 for share in hidden):
        lines.append(
            "hidden share above 1: the split step was slower without its exchange than with it, so "
            "that more than the exchange sets them apart"
        )
    if any(share.high < 0 for share in hidden):
        lines.append(
            "hidden share below 0: the exchange costs the split step, which has twice as many "
            "transfers, more than the plain one"
        )
    if any(row.experts_plain_ns is not None for row in worth.rows):
        lines.append(
            "experts: device time of the expert matmuls of a step, traced after all timing; "
            "growth: split over plain"
        )
    return lines


def _left_out(worth: WorthRecord) -> Iterable[str]:
    """Each reason once, with the sizes that it holds for."""
    reasons: dict[str, list[str]] = {}
    for row in worth.rows:
        size = f"{row.kind} {row.num_tokens}"
        texts = {
            "no bare steps": row.bare_note,
            "no hidden share": row.hidden_note if row.hidden_note != row.bare_note else "",
            "no growth of the experts": row.experts_note,
        }
        for what, text in texts.items():
            if text:
                reasons.setdefault(f"{what}: {text}", []).append(size)
    for reason, sizes in reasons.items():
        whole = len(sizes) == len(worth.rows)
        yield reason if whole else f"{reason} ({', '.join(sizes)})"
    yield from (f"left out: {note}" for note in worth.notes)
