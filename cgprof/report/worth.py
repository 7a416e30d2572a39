"""Is dual batch overlap worth it here: steps plain and split, what is hidden, and from where on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cgprof.record.types import RunRecord
from cgprof.record.worth import Estimate, StepTimes, WorthRecord, WorthRow
from cgprof.report.layout import Cell, Interval, Table, format_ratio, one_line, ratio

_COLUMNS = {
    "kind": "steps of",
    "num_tokens": "tokens a rank",
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
    name for name in _COLUMNS if name.startswith(("hidden", "experts", "ex")) or "bare" in name
)
_STAND_IN = "CPU stand-in times, never GPU times"


def worth_table(record: RunRecord) -> Table:
    """Returns one row a token count, with how each number was measured."""
    worth = record.worth
    if worth is None:
        return Table(name="worth", title=_title(None), columns=_COLUMNS, rows=())
    return Table(
        name="worth",
        title=_title(worth),
        columns=_COLUMNS,
        rows=tuple(_row(row) for row in worth.rows),
        notes=(*_measured(record, worth), *map(one_line, _left_out(worth))),
        optional=_OPTIONAL,
    )


def worth_lines(record: RunRecord) -> list[str]:
    """Returns the finding of each kind of steps, in one sentence each."""
    worth = record.worth
    if worth is None:
        return []
    stand_in = f" ({_STAND_IN})" if record.recorder == "tape" else ""
    lines = []
    for kind in ("decode", "prefill"):
        rows = sorted((row for row in worth.rows if row.kind == kind), key=_size)
        if not rows:
            lines.append(f"DBO for {kind}: not measured, no step of a size that can be compared")
            continue
        finding = _splitting_alone(rows) if worth.num_ranks <= 1 else _finding(rows)
        lines.append(f"DBO for {kind}, {_where(worth)}: {finding}{stand_in}")
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


def _finding(rows: Sequence[WorthRow]) -> str:
    span = _span(rows)
    first = break_even(rows)
    if first is not None:
        return f"break-even at {first.num_tokens} tokens a rank, {_speed(first)}; {span}"
    largest = rows[-1].num_tokens
    paying = [str(row.num_tokens) for row in rows if row.verdict == "worth it"]
    open_sizes = [str(row.num_tokens) for row in rows if row.verdict == "undecided"]
    still_open = f"; undecided at {', '.join(open_sizes)}" if open_sizes else ""
    best = max(rows, key=lambda row: row.speedup.value if row.speedup else 0.0)
    if paying:
        return (
            f"no break-even up to {largest} tokens a rank: it pays at {', '.join(paying)} "
            f"but not up to the largest{still_open}; {span}"
        )
    return (
        f"no break-even up to {largest} tokens a rank; the best is {best.num_tokens} tokens, "
        f"{_speed(best)}{still_open}; {span}"
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


def _speed(row: WorthRow) -> str:
    if row.speedup is None:
        return "of unknown speed"
    speed = row.speedup
    return f"plain/split {format_ratio(speed.value)} [{speed.low:.2f}, {speed.high:.2f}]"


def _where(worth: WorthRecord) -> str:
    if worth.num_ranks <= 1:
        return "one rank"
    return f"{worth.exchange} over {worth.num_ranks} ranks"


def _title(worth: WorthRecord | None) -> str:
    title = "is DBO worth it here"
    return title if worth is None else f"{title}: {_where(worth)}"


def _row(row: WorthRow) -> tuple[Cell, ...]:
    hidden = row.hidden
    experts = ratio(row.experts_split_ns, row.experts_plain_ns)
    return (
        row.kind,
        row.num_tokens,
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
    if any(row.plain_bare for row in worth.rows):
        lines.append(
            "bare: the same without its collectives, all else unchanged, experts fed what the "
            "exchange last brought; exchange = plain - plain bare, exposed = split - split bare, "
            "hidden share = 1 - exposed / exchange, with its 95 % interval"
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
