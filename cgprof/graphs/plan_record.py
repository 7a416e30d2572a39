"""A plan as the record of a run keeps it and as `cgprof plan` prints it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from cgprof.config.flags import spell
from cgprof.config.schema import ModelConfig, RunConfig
from cgprof.errors import UnsupportedError
from cgprof.graphs.estimate import arena_bytes, node_bytes
from cgprof.graphs.modes import ResolvedPolicy, requested_mode, resolve_policy
from cgprof.graphs.plan import CapturePlan, make_plan
from cgprof.graphs.pool_size import pool_bytes
from cgprof.graphs.trim import trim
from cgprof.record.types import PlannedMode, PlanRecord, SkippedKey
from cgprof.shapes import GraphSupport, RuntimeMode
from cgprof.units import format_ranges


def resolve_plan(
    run: RunConfig, model: ModelConfig, support: GraphSupport = GraphSupport.ALWAYS
) -> tuple[ResolvedPolicy, CapturePlan]:
    """Returns the policy that a run really has and its plan; our backends allow every graph.

    A budget of graph memory trims the plan by the model's estimate: equally on every rank.

    Raises:
        ConfigError: The policy or its sizes are refused, or the budget holds no plan.
        UnsupportedError: The run is strict and would not get all that was asked for.
    """
    policy = resolve_policy(run.capture.policy, support)
    plan = _within_budget(
        run, model, make_plan(policy.policy, run.limits, run.capture, run.microbatch)
    )
    lacking = list(_lacking(run, policy, plan)) if run.capture.strict else []
    if lacking:
        raise UnsupportedError(
            spell("capture.strict"),
            f"{'; '.join(lacking)}; change what was asked for, or leave --strict out",
        )
    return policy, plan


def plan_record(policy: ResolvedPolicy, plan: CapturePlan) -> PlanRecord:
    """Returns the record of a plan and of what became of the policy that was asked for."""
    return PlanRecord(
        requested_policy=policy.requested,
        policy=policy.policy,
        policy_reason=policy.reason,
        labels=tuple(str(key) for key in plan.keys),
        modes=tuple(_modes(policy, plan)),
        skipped=tuple(
            SkippedKey(key=skipped.key, label=str(skipped.key), reason=skipped.reason)
            for skipped in plan.skipped
        ),
        uncovered_batches=plan.uncovered_batches,
        fingerprint=plan.fingerprint,
    )


def _within_budget(run: RunConfig, model: ModelConfig, plan: CapturePlan) -> CapturePlan:
    budget = run.capture.max_graph_memory_bytes
    if budget is None:
        return plan
    nodes = {key: node_bytes(model, run, key) for key in plan.keys}
    return trim(
        plan,
        lambda keys: pool_bytes(model, run, keys) + arena_bytes(nodes[key] for key in keys),
        budget,
        run.microbatch,
        num_ranks=run.parallel.data_parallel_size,
    )


def _modes(policy: ResolvedPolicy, plan: CapturePlan) -> Iterator[PlannedMode]:
    for key in plan.keys:
        requested = requested_mode(policy.requested, key)
        yield PlannedMode(
            label=str(key),
            requested=requested.name,
            effective=key.mode.name,
            reason="" if requested is key.mode else policy.reason,
        )
    for skipped in plan.skipped:
        yield PlannedMode(
            label=str(skipped.key),
            requested=skipped.key.mode.name,
            effective=RuntimeMode.NONE.name,
            reason=skipped.reason,
        )
    asked, got = policy.requested.mixed_mode, policy.policy.mixed_mode
    if asked is not got:
        yield PlannedMode(
            label="mixed batches", requested=asked.name, effective=got.name, reason=policy.reason
        )


def _lacking(run: RunConfig, policy: ResolvedPolicy, plan: CapturePlan) -> Iterator[str]:
    """What was asked for and is not planned; what a twin policy leaves out was asked for."""
    if policy.policy is not policy.requested:
        yield (
            f"{policy.requested.value} was asked for and {policy.policy.value} would run: "
            f"{policy.reason}"
        )
    for skipped in plan.skipped:
        if skipped.key.num_reqs is None:
            yield f"size {skipped.key.num_tokens}: {skipped.reason}"
    cut = Counter(skipped.cause for skipped in plan.skipped if skipped.cause)
    for cause, count in cut.items():
        yield f"{count} keys are {cause}"
    if plan.uncovered_batches:
        yield f"decode batches {format_ranges(plan.uncovered_batches)} would run eager"
