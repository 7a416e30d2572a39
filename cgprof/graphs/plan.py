"""Config -> capture plan: the keys in capture order, and what was skipped and why. Pure.

Plain keys come largest first, then twins largest first, so that later graphs fit the pool.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cgprof.config.schema import CaptureConfig, Limits, MicrobatchConfig, TwinPolicy
from cgprof.errors import ConfigError
from cgprof.graphs.dispatch import choose
from cgprof.microbatch.rule import wants_split
from cgprof.shapes import BatchShape, CapturePolicy, GraphKey, RuntimeMode

_DEFAULT_CAP = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedKey:
    """A key that was considered and left out."""

    key: GraphKey
    reason: str
    cause: str = ""  # the part of the reason that it shares with other keys, if there is one


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturePlan:
    """What will be captured, in capture order; equal on every rank."""

    keys: tuple[GraphKey, ...]
    skipped: tuple[SkippedKey, ...]
    uncovered_batches: tuple[int, ...]  # decode request counts that no plain key or twin serves

    @property
    def plain(self) -> tuple[GraphKey, ...]:
        """Keys of one microbatch, in capture order."""
        return tuple(key for key in self.keys if not key.is_twin)

    @property
    def twins(self) -> tuple[GraphKey, ...]:
        """Keys of several microbatches, in capture order."""
        return tuple(key for key in self.keys if key.is_twin)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the keys as canonical JSON."""
        text = json.dumps([dataclasses.asdict(key) for key in self.keys], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def default_sizes(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    query_len: int = 1,
    max_size: int | None = None,
) -> list[int]:
    """Returns 1, 2, 4, 8..<256 by 8, 256..cap by 16, and the exact largest decode batch.

    cap = min(2 x max_num_seqs x query_len, 512, max_num_batched_tokens). Source: vLLM's defaults;
    the exact maximum is added so that no decode batch is left to run eager. A smaller `max_size`
    cuts the sizes; a larger one raises the cap and is itself a size, if the tokens allow it.
    """
    usual = min(2 * max_num_seqs * query_len, _DEFAULT_CAP, max_num_batched_tokens)
    cap = usual if max_size is None else min(max(usual, max_size), max_num_batched_tokens)
    ladder = [1, 2, 4, *range(8, 256, 8), *range(256, cap + 1, 16)]
    exact = min(max_num_seqs * query_len, max_num_batched_tokens)
    sizes = {size for size in ladder if size <= cap} | {exact}
    if cap > usual and cap == max_size:
        sizes.add(cap)
    return sorted(size for size in sizes if max_size is None or size <= max_size)


def make_plan(
    policy: CapturePolicy,
    limits: Limits,
    capture: CaptureConfig,
    microbatch: MicrobatchConfig,
    *,
    query_lens: Sequence[int] = (1,),
) -> CapturePlan:
    """Returns the plan of a resolved policy; `query_lens` are the uniform lengths that can occur.

    Raises:
        ConfigError: max_num_batched_tokens is below max_num_seqs, or sizes disagree or give no key.
    """
    if limits.max_num_batched_tokens < limits.max_num_seqs:
        raise ConfigError(
            "limits.max_num_batched_tokens (--max-num-batched-tokens)",
            f"{limits.max_num_batched_tokens} is below max_num_seqs {limits.max_num_seqs}; "
            "one decode step could not hold all requests",
        )
    skipped: list[SkippedKey] = []
    sizes = _capture_sizes(policy, limits, capture, max(query_lens), skipped)
    plain = list(dict.fromkeys(_plain_keys(policy, sizes, limits, query_lens)))
    if policy is not CapturePolicy.NONE and not plain:
        raise ConfigError(
            "capture.sizes (--cudagraph-capture-sizes)",
            f"none of {', '.join(map(str, capture.sizes or sizes))} gives a key of policy "
            f"{policy.value}: max_num_seqs is {limits.max_num_seqs}, max_num_batched_tokens "
            f"{limits.max_num_batched_tokens}; choose smaller sizes or leave them out",
        )
    asked = sizes if capture.sizes is not None else [s for s in sizes if s == capture.max_size]
    _note_unused(asked, plain, limits, skipped)
    twins = _twins(plain, microbatch, set(query_lens), skipped)
    plain = _drop_plain(plain, twins, microbatch, skipped)
    keys = tuple(_largest_first(plain) + _largest_first(twins))
    return CapturePlan(
        keys=keys,
        skipped=tuple(skipped),
        uncovered_batches=_uncovered(policy, keys, limits, microbatch, query_lens),
    )


def _capture_sizes(
    policy: CapturePolicy,
    limits: Limits,
    capture: CaptureConfig,
    query_len: int,
    skipped: list[SkippedKey],
) -> list[int]:
    if policy is CapturePolicy.NONE:
        return []
    if capture.sizes is None:
        most, tokens = capture.max_size, limits.max_num_batched_tokens
        if most is not None and most > tokens:
            skipped.append(_above_tokens(most, tokens))
        return default_sizes(limits.max_num_seqs, tokens, query_len, most)
    sizes = sorted(set(capture.sizes))
    if capture.max_size is not None and sizes[-1] != capture.max_size:
        raise ConfigError(
            "capture.max_size (--max-cudagraph-capture-size)",
            f"{capture.max_size} disagrees with the largest of --cudagraph-capture-sizes, "
            f"{sizes[-1]}; give one of the two",
        )
    tokens = limits.max_num_batched_tokens
    skipped += [_above_tokens(size, tokens) for size in sizes if size > tokens]
    return [size for size in sizes if size <= tokens]


def _above_tokens(size: int, max_num_batched_tokens: int) -> SkippedKey:
    return SkippedKey(
        key=GraphKey(mode=RuntimeMode.FULL, num_tokens=size),
        reason=f"above max_num_batched_tokens {max_num_batched_tokens}",
    )


def _plain_keys(
    policy: CapturePolicy, sizes: Sequence[int], limits: Limits, query_lens: Sequence[int]
) -> Iterator[GraphKey]:
    for size in sizes:
        if policy.separates_decode and policy.decode_mode is RuntimeMode.FULL:
            for query_len in query_lens:
                num_reqs = -(-size // query_len)
                fits = num_reqs * query_len <= limits.max_num_batched_tokens
                if num_reqs <= limits.max_num_seqs and fits:
                    yield GraphKey(
                        mode=RuntimeMode.FULL,
                        num_tokens=num_reqs * query_len,
                        num_reqs=num_reqs,
                        uniform_query_len=query_len,
                    )
        if policy.mixed_mode is RuntimeMode.FULL:
            yield GraphKey(
                mode=RuntimeMode.FULL, num_tokens=size, num_reqs=min(size, limits.max_num_seqs)
            )


def _note_unused(
    sizes: Sequence[int], plain: Sequence[GraphKey], limits: Limits, skipped: list[SkippedKey]
) -> None:
    """Sizes of a user's list that gave no key, because no decode step is that large."""
    largest = max((key.num_tokens for key in plain), default=0)
    for size in sizes:
        if size > largest:
            key = GraphKey(mode=RuntimeMode.FULL, num_tokens=size)
            reason = f"no decode step is so large: max_num_seqs is {limits.max_num_seqs}"
            skipped.append(SkippedKey(key=key, reason=reason))


def _twins(
    plain: Sequence[GraphKey],
    config: MicrobatchConfig,
    reachable: set[int],
    skipped: list[SkippedKey],
) -> list[GraphKey]:
    twins = []
    for key in plain:
        if key.num_reqs is None or key.num_tokens % key.num_reqs:
            continue
        query_len = key.num_tokens // key.num_reqs
        if not wants_split(key.num_tokens, uniform=True, config=config):
            continue
        twin = dataclasses.replace(
            key, uniform_query_len=query_len, num_microbatches=config.num_microbatches
        )
        if query_len in reachable:
            twins.append(twin)
        else:
            reason = (
                f"unreachable: {key.num_tokens} tokens over {key.num_reqs} requests is a uniform "
                f"query length of {query_len}, which no step has"
            )
            skipped.append(SkippedKey(key=twin, reason=reason))
    return twins


def _drop_plain(
    plain: Sequence[GraphKey],
    twins: Sequence[GraphKey],
    config: MicrobatchConfig,
    skipped: list[SkippedKey],
) -> list[GraphKey]:
    if config.twins is TwinPolicy.BOTH:
        return list(plain)
    twinned = {(twin.num_tokens, twin.num_reqs) for twin in twins}
    band_end = 2 * config.decode_token_threshold if config.twins is TwinPolicy.BAND else 0
    kept = []
    for key in plain:
        if (key.num_tokens, key.num_reqs) in twinned and key.num_tokens > band_end:
            reason = f"twin policy {config.twins.value}: only the twin of this size is captured"
            skipped.append(SkippedKey(key=key, reason=reason))
        else:
            kept.append(key)
    return kept


def _largest_first(keys: Sequence[GraphKey]) -> list[GraphKey]:
    return sorted(keys, key=lambda key: (-key.num_tokens, -(key.uniform_query_len or 0)))


def _uncovered(
    policy: CapturePolicy,
    keys: Sequence[GraphKey],
    limits: Limits,
    config: MicrobatchConfig,
    query_lens: Sequence[int],
) -> tuple[int, ...]:
    """Decode request counts 1..max_num_seqs that neither a plain key nor a wished twin serves."""
    if policy is CapturePolicy.NONE:
        return ()
    missing = []
    for num_reqs in range(1, limits.max_num_seqs + 1):
        for query_len in query_lens:
            shape = BatchShape(
                num_reqs=num_reqs, num_tokens=num_reqs * query_len, max_query_len=query_len
            )
            counts = {1}
            if wants_split(shape.num_tokens, uniform=True, config=config):
                counts.add(config.num_microbatches)
            if all(choose(shape, keys, num_microbatches=n) is None for n in counts):
                missing.append(num_reqs)
                break
    return tuple(missing)
