import pytest

from cgprof.errors import UnsupportedError
from cgprof.graphs.modes import resolve_policy
from cgprof.shapes import CapturePolicy, GraphSupport


@pytest.mark.parametrize("policy", list(CapturePolicy))
def test_resolve_keeps_or_refuses_when_everything_is_supported(policy):
    if policy in (CapturePolicy.PIECEWISE, CapturePolicy.FULL_AND_PIECEWISE):
        with pytest.raises(UnsupportedError, match="piecewise graphs, which cgprof cannot"):
            resolve_policy(policy, GraphSupport.ALWAYS)
    else:
        resolved = resolve_policy(policy, GraphSupport.ALWAYS)
        assert (resolved.requested, resolved.policy, resolved.reason) == (policy, policy, "")


@pytest.mark.parametrize(
    "support", [GraphSupport.UNIFORM_BATCH, GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE]
)
def test_resolve_lowers_full_to_decode_only_and_says_why(support):
    resolved = resolve_policy(CapturePolicy.FULL, support)
    assert resolved.requested is CapturePolicy.FULL
    assert resolved.policy is CapturePolicy.FULL_DECODE_ONLY
    assert support.name in resolved.reason


def test_resolve_refuses_a_backend_without_any_full_graph():
    for policy in (CapturePolicy.FULL, CapturePolicy.FULL_DECODE_ONLY):
        with pytest.raises(UnsupportedError, match="NEVER; use --mode none"):
            resolve_policy(policy, GraphSupport.NEVER)


def test_resolve_refuses_longer_queries_on_a_single_token_backend():
    support = GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert resolve_policy(CapturePolicy.FULL_DECODE_ONLY, support, query_len=1).policy
    with pytest.raises(UnsupportedError, match="UNIFORM_BATCH"):
        resolve_policy(CapturePolicy.FULL_DECODE_ONLY, support, query_len=3)


def test_resolve_none_needs_no_support():
    assert resolve_policy(CapturePolicy.NONE, GraphSupport.NEVER).policy is CapturePolicy.NONE
