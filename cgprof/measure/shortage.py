"""A capture that ran out of memory: what was free, what graphs held, what fitted, what to lower."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cgprof.record.graph import GraphRecord
from cgprof.shapes import GraphKey
from cgprof.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Memory when a capture ran out of it."""

    free_bytes: int
    total_bytes: int
    pool_bytes: int  # of the graphs captured before
    tried: str  # what could not be had, in the allocator's words; empty if it does not say
    largest_planned: int  # tokens

    def describe(self, key: GraphKey, fitted: GraphKey | None) -> str:
        """Returns the failure of a key; `fitted` is the largest key that was captured."""
        tried = f" ({self.tried} asked for)" if self.tried else ""
        largest = (
            "no graph has fitted" if fitted is None else f"the largest that fitted is {fitted}"
        )
        return (
            f"capture of {key} failed: out of memory{tried}: {format_bytes(self.free_bytes)} "
            f"({self.free_bytes} bytes) free of {format_bytes(self.total_bytes)} "
            f"({self.total_bytes}), the graph pool held {format_bytes(self.pool_bytes)} "
            f"({self.pool_bytes}); {largest}; lower --max-cudagraph-capture-size, now "
            f"{self.largest_planned}"
        )


def largest_key(keys: Iterable[GraphKey]) -> GraphKey | None:
    """Returns the key of most tokens, the first of several."""
    return max(keys, key=lambda key: key.num_tokens, default=None)


def with_final_words(
    records: Sequence[GraphRecord], shortages: Mapping[GraphKey, Shortage]
) -> list[GraphRecord]:
    """Returns the records once all captures are over, when it is known what fitted at all."""
    fitted = largest_key(record.key for record in records if record.failure is None)
    return [
        record.model_copy(update={"failure": shortages[record.key].describe(record.key, fitted)})
        if record.key in shortages
        else record
        for record in records
    ]
