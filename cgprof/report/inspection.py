"""An inspected model card, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator

from cgprof.config.inspect import Inspection
from cgprof.report.document import Document, Lines
from cgprof.report.layout import Table
from cgprof.units import format_bytes


def inspection_document(found: Inspection, tokens: int | None = None) -> Document:
    """Returns a card as people and programs read it."""
    fields = Table(
        name="fields",
        title="fields",
        columns={"field": "field", "value": "value", "source": "source"},
        rows=tuple((field.name, field.shown, field.source) for field in found.fields),
    )
    weights = Table(
        name="weights",
        title="weights",
        columns={
            "part": "part",
            "num_parameters": "parameters",
            "num_quantised": "quantised",
            "total_bytes": "bytes",
        },
        rows=(
            *found.weights,
            ("total", found.num_parameters, _quantised(found), found.weight_bytes),
        ),
        optional=frozenset() if found.quantisation else frozenset({"num_quantised"}),
    )
    return Document(
        blocks=[Lines(lines=list(_lines(found, tokens))), fields, weights],
        tables=[fields, weights],
        data=lambda: _data(found, tokens),
    )


def _lines(found: Inspection, tokens: int | None) -> Iterator[str]:
    yield f"model: {found.name} ({found.path})"
    family = found.family or "unknown"
    yield f"family: {family}" if found.refusal is None else f"family: {family}, cannot be run"
    if found.refusal is not None:
        yield f"why not: {found.refusal}"
    yield "feed-forward: " + (f"MoE, {found.num_experts} experts" if found.is_moe else "dense")
    yield f"attention: {found.attention}"
    yield f"KV bytes a token: {_both(found.kv_bytes_per_token)} in {found.dtype}"
    if tokens is not None:
        yield f"KV bytes of {tokens} tokens: {_both(tokens * found.kv_bytes_per_token)}"
    if found.weight_bytes is None:
        parts = ", ".join(part.name for part in found.weights if part.num_bytes is None)
        yield f"weight bytes: unknown, the card does not give the size of: {parts}"
    else:
        yield f"weight bytes: {_both(found.weight_bytes)} in {_weight_dtype(found)}"
    if found.quantisation is not None:
        names = len(found.quantisation.ignored)
        yield (
            f"quantisation: {found.quantisation.method} ({found.quantisation.source}), "
            f"{names} entries of its ignore list left in {found.dtype}"
        )
    yield f"fingerprint: {found.fingerprint}"
    for note in found.notes:
        yield f"note: {note}"


def _data(found: Inspection, tokens: int | None) -> dict[str, object]:
    quantisation = found.quantisation
    return {
        "model": found.name,
        "path": found.path,
        "family": found.family or "unknown",
        "can_be_run": found.refusal is None,
        "refusal": found.refusal,
        "is_moe": found.is_moe,
        "attention": found.attention,
        "dtype": found.dtype,
        "fields": {
            field.name: {"value": field.value, "source": field.source} for field in found.fields
        },
        "kv_bytes_per_token": found.kv_bytes_per_token,
        "tokens": tokens,
        "kv_bytes": None if tokens is None else tokens * found.kv_bytes_per_token,
        "weights": [
            {
                "part": part.name,
                "num_parameters": part.num_parameters,
                "num_quantised": part.num_quantised,
                "total_bytes": part.num_bytes,
            }
            for part in found.weights
        ],
        "num_parameters": found.num_parameters,
        "weight_bytes": found.weight_bytes,
        "quantisation": None if quantisation is None else quantisation.method,
        "quantisation_source": None if quantisation is None else quantisation.source,
        "fingerprint": found.fingerprint,
        "notes": list(found.notes),
    }


def _quantised(found: Inspection) -> int | None:
    if found.num_parameters is None:
        return None
    return sum(part.num_quantised or 0 for part in found.weights)


def _weight_dtype(found: Inspection) -> str:
    if found.quantisation is None:
        return found.dtype
    return f"{found.quantisation.method} and {found.dtype}"


def _both(num_bytes: int) -> str:
    return f"{num_bytes} ({format_bytes(num_bytes)})"
