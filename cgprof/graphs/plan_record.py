"""A plan as the record of a run keeps it and as `cgprof plan` prints it."""

from __future__ import annotations

from cgprof.config.schema import RunConfig
from cgprof.graphs.modes import ResolvedPolicy, resolve_policy
from cgprof.graphs.plan import CapturePlan, make_plan
from cgprof.record.types import PlanRecord, SkippedKey
from cgprof.shapes import GraphSupport


def resolve_plan(run: RunConfig) -> tuple[ResolvedPolicy, CapturePlan]:
    """Returns the policy that a run really has and its plan; our backends allow every graph.

    Raises:
        ConfigError: The policy or its sizes are refused.
    """
    policy = resolve_policy(run.capture.policy, GraphSupport.ALWAYS)
    return policy, make_plan(policy.policy, run.limits, run.capture, run.microbatch)


def plan_record(policy: ResolvedPolicy, plan: CapturePlan) -> PlanRecord:
    """Returns the record of a plan and of what became of the policy that was asked for."""
    return PlanRecord(
        requested_policy=policy.requested,
        policy=policy.policy,
        policy_reason=policy.reason,
        labels=tuple(str(key) for key in plan.keys),
        skipped=tuple(
            SkippedKey(key=skipped.key, label=str(skipped.key), reason=skipped.reason)
            for skipped in plan.skipped
        ),
        uncovered_batches=plan.uncovered_batches,
        fingerprint=plan.fingerprint,
    )
