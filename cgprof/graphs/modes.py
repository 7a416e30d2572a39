"""Capture policy x attention support -> the policy that a run really has, with the reason."""

from __future__ import annotations

from dataclasses import dataclass

from cgprof.errors import UnsupportedError
from cgprof.shapes import CapturePolicy, GraphKey, GraphSupport, RuntimeMode

_WHERE = "capture.policy (--mode)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedPolicy:
    """What was asked for and what is captured; `reason` is empty when they are equal."""

    requested: CapturePolicy
    policy: CapturePolicy
    reason: str = ""


def requested_mode(policy: CapturePolicy, key: GraphKey) -> RuntimeMode:
    """Returns the mode that a policy asks for in the steps that a key is for."""
    return policy.mixed_mode if key.uniform_query_len is None else policy.decode_mode


def resolve_policy(
    requested: CapturePolicy, support: GraphSupport, *, query_len: int = 1
) -> ResolvedPolicy:
    """Returns the policy that the attention backend allows.

    Raises:
        UnsupportedError: The policy has piecewise graphs, or the backend allows no full graph.
    """
    if RuntimeMode.PIECEWISE in (requested.decode_mode, requested.mixed_mode):
        raise UnsupportedError(
            _WHERE,
            f"{requested.value} has piecewise graphs, which cgprof cannot capture yet; "
            "use --mode full, full-decode-only or none",
        )
    if requested is CapturePolicy.NONE:
        return ResolvedPolicy(requested=requested, policy=requested)
    needed = (
        GraphSupport.UNIFORM_BATCH if query_len > 1 else GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )
    if support < needed:
        raise UnsupportedError(
            _WHERE,
            f"{requested.value} needs an attention backend with graph support {needed.name}, "
            f"this one has {support.name}; use --mode none",
        )
    if requested is CapturePolicy.FULL and support is not GraphSupport.ALWAYS:
        return ResolvedPolicy(
            requested=requested,
            policy=CapturePolicy.FULL_DECODE_ONLY,
            reason=f"attention graph support is {support.name}, full needs ALWAYS",
        )
    return ResolvedPolicy(requested=requested, policy=requested)
