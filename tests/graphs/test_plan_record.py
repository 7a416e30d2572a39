import pytest

from cgprof.config.schema import CaptureConfig, Limits, MicrobatchConfig, RunConfig, TwinPolicy
from cgprof.errors import UnsupportedError
from cgprof.graphs.estimate import estimate_plan
from cgprof.graphs.plan_record import plan_record, resolve_plan
from cgprof.graphs.pool_size import pool_bytes
from cgprof.shapes import CapturePolicy, GraphSupport
from tests.support.builders import tiny_model
from tests.support.kept import kept_run

MODEL = tiny_model()
LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=64)
FULL = CapturePolicy.FULL


def run(policy=FULL, *, limits=LIMITS, microbatch=None, **capture):
    return RunConfig(
        limits=limits,
        capture=CaptureConfig(policy=policy, **capture),
        microbatch=microbatch or MicrobatchConfig(),
    )


def modes(made):
    return {one.label: (one.requested, one.effective, one.reason) for one in made.modes}


def test_every_planned_key_that_runs_as_asked_says_so_without_a_reason():
    made = plan_record(*resolve_plan(run(sizes=(1, 2, 8)), MODEL))
    assert set(modes(made)) == set(made.labels)
    assert set(modes(made).values()) == {("FULL", "FULL", "")}


@pytest.mark.parametrize(
    "support", [GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE, GraphSupport.UNIFORM_BATCH]
)
def test_mode_that_the_backend_lowers_is_in_the_record_and_refused_when_strict(support):
    made = plan_record(*resolve_plan(run(sizes=(1, 2, 8)), MODEL, support))
    reason = f"attention graph support is {support.name}, full needs ALWAYS"
    assert (made.requested_policy, made.policy) == (FULL, CapturePolicy.FULL_DECODE_ONLY)
    assert modes(made).pop("mixed batches") == ("FULL", "NONE", reason)
    assert all(modes(made)[label] == ("FULL", "FULL", "") for label in made.labels)
    with pytest.raises(UnsupportedError) as caught:
        resolve_plan(run(sizes=(1, 2, 8), strict=True), MODEL, support)
    assert str(caught.value) == (
        "capture.strict (--strict): full was asked for and full-decode-only would run: "
        f"{reason}; change what was asked for, or leave --strict out"
    )


def test_size_that_gives_no_key_is_requested_full_and_runs_as_none():
    policy = CapturePolicy.FULL_DECODE_ONLY
    made = plan_record(*resolve_plan(run(policy, sizes=(8, 16, 128)), MODEL))
    too_large = "no decode step is so large: max_num_seqs is 8"
    assert modes(made)["FULL-16"] == ("FULL", "NONE", too_large)
    assert modes(made)["FULL-128"] == ("FULL", "NONE", "above max_num_batched_tokens 64")
    with pytest.raises(UnsupportedError, match="size 16: no decode step is so large"):
        resolve_plan(run(policy, sizes=(8, 16), strict=True), MODEL)
    with pytest.raises(UnsupportedError, match="size 128: above max_num_batched_tokens 64"):
        resolve_plan(run(policy, sizes=(8, 128), strict=True), MODEL)


@pytest.mark.parametrize(
    ("max_num_seqs", "max_size", "uncovered"),
    [(12, 8, "9-12"), (20, 16, "17-20"), (300, 288, "289-300")],
)
def test_strict_refuses_a_ladder_whose_top_is_cut_off(max_num_seqs, max_size, uncovered):
    limits = Limits(max_num_seqs=max_num_seqs)
    with pytest.raises(UnsupportedError, match=f"decode batches {uncovered} would run eager"):
        resolve_plan(run(limits=limits, max_size=max_size, strict=True), MODEL)
    _, plan = resolve_plan(run(limits=limits, max_size=max_size), MODEL)
    assert plan.uncovered_batches == tuple(range(max_size + 1, max_num_seqs + 1))
    for whole in (None, max_num_seqs):
        _, plan = resolve_plan(run(limits=limits, max_size=whole, strict=True), MODEL)
        assert plan.uncovered_batches == ()


def test_strict_takes_what_the_twin_policy_leaves_out_as_asked_for():
    split = MicrobatchConfig(enabled=True, decode_token_threshold=4, twins=TwinPolicy.TWIN_ONLY)
    _, plan = resolve_plan(run(microbatch=split, sizes=(1, 2, 3, 4, 8), strict=True), MODEL)
    assert plan.skipped


def budget_run(max_bytes, **capture):
    split = MicrobatchConfig(enabled=True, decode_token_threshold=2)
    sizes = {"sizes": (1, 2, 3, 4, 5, 6, 7, 8), "max_graph_memory_bytes": max_bytes}
    return run(CapturePolicy.FULL_DECODE_ONLY, microbatch=split, **sizes, **capture)


def test_budget_trims_the_plan_by_the_estimate_and_says_so_in_the_record():
    deep = tiny_model(num_layers=200)
    policy, whole = resolve_plan(budget_run(None), deep)
    total = estimate_plan(deep, budget_run(None), whole.keys).total_bytes
    _, plan = resolve_plan(budget_run(total - 1), deep)
    assert 0 < len(whole.keys) - len(plan.keys) < len(whole.keys)
    assert plan.plain == whole.plain
    assert plan.fingerprint != whole.fingerprint
    assert estimate_plan(deep, budget_run(None), plan.keys).total_bytes < total
    made = plan_record(policy, plan)
    left_out = {one.label: one.reason for one in made.skipped}
    assert set(left_out) == {str(key) for key in set(whole.keys) - set(plan.keys)}
    assert all("its batches pad to FULL-" in reason for reason in left_out.values())
    assert resolve_plan(budget_run(total), deep)[1] == whole


def test_strict_refuses_a_plan_that_a_budget_trims():
    deep = tiny_model(num_layers=200)
    whole = estimate_plan(deep, budget_run(None), resolve_plan(budget_run(None), deep)[1].keys)
    total = whole.total_bytes
    assert resolve_plan(budget_run(total, strict=True), deep)[1].twins
    with pytest.raises(UnsupportedError, match="keys are left out to keep graph memory within"):
        resolve_plan(budget_run(total - 1, strict=True), deep)


def test_budget_of_what_a_trimmed_plan_is_estimated_to_take_keeps_that_plan():
    """A smaller key that widened the pool is gone, and with it what it would have needed."""
    record = kept_run("h200-qwen3-30b-a3b-full-dbo")

    def within(max_bytes):
        capture = record.config.capture.model_copy(update={"max_graph_memory_bytes": max_bytes})
        config = record.config.model_copy(update={"capture": capture})
        _, plan = resolve_plan(config, record.model)
        return plan, estimate_plan(record.model, config, plan.keys).total_bytes

    whole, _ = within(None)
    trimmed, total = within(50 * 1024**2)
    pools = [pool_bytes(record.model, record.config, keys) for keys in (trimmed.keys, whole.keys)]
    assert 0 < pools[0] < pools[1]
    assert within(total)[0].keys == trimmed.keys
