"""A plan as the record of a run keeps it and as `cgprof plan` prints it."""

from __future__ import annotations

from cgprof.graphs.modes import ResolvedPolicy
from cgprof.graphs.plan import CapturePlan
from cgprof.record.types import PlanRecord, SkippedKey


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
