import pytest

from cgprof.config.compat import check
from cgprof.config.load import load_run
from cgprof.errors import ConfigError, UnsupportedError


def refusal(model: str, **overrides: object) -> ConfigError:
    dotted = {path.replace("__", "."): value for path, value in overrides.items()}
    with pytest.raises(ConfigError) as caught:
        check(*load_run(None, model, dotted))
    return caught.value


def test_dual_batch_overlap_on_a_dense_model_is_refused():
    error = refusal("tiny-dense", microbatch__enabled=True)
    assert isinstance(error, UnsupportedError)
    assert "no experts in this config" in error.problem
    assert "--dbo" in error.where


def test_weighing_an_overlap_that_is_off_is_refused():
    error = refusal("tiny-moe", microbatch__worth=True)
    assert "--dbo-worth" in error.where
    assert "add --dbo" in error.problem
    check(*load_run(None, "tiny-moe", {"microbatch.worth": True, "microbatch.enabled": True}))


@pytest.mark.parametrize("field", ["decode_token_threshold", "prefill_token_threshold"])
@pytest.mark.parametrize("threshold", [-1, 0, 1])
def test_threshold_below_the_microbatches_is_refused(field, threshold):
    overrides = {"microbatch__enabled": True, f"microbatch__{field}": threshold}
    error = refusal("tiny-moe", **overrides)
    assert str(threshold) in error.problem
    assert "2 microbatches" in error.problem
    assert "--dbo-" in error.where


def test_threshold_of_the_microbatches_is_allowed():
    enabled = {"microbatch.enabled": True, "microbatch.decode_token_threshold": 2}
    check(*load_run(None, "tiny-moe", enabled))
    error = refusal(
        "tiny-moe",
        microbatch__enabled=True,
        microbatch__num_microbatches=3,
        microbatch__decode_token_threshold=2,
    )
    assert "3 microbatches" in error.problem


def test_threshold_does_not_matter_without_microbatches():
    check(*load_run(None, "tiny-dense", {"microbatch.decode_token_threshold": 0}))


def capacity_settings(**changes: object) -> dict[str, object]:
    """128 requests of up to 6 tokens each on two ranks, and room for 512 of 768."""
    settings: dict[str, object] = {
        "parallel.data_parallel_size": 2,
        "parallel.dispatch_capacity": 512,
        "limits.max_num_seqs": 128,
        "limits.max_num_batched_tokens": 128 * 6,
    }
    return settings | {path.replace("__", "."): value for path, value in changes.items()}


def capacity_problem(**changes: object) -> str:
    """What is said against the capacity, if anything."""
    try:
        check(*load_run(None, "tiny-moe", capacity_settings(**changes)))
    except ConfigError as error:
        return error.problem if "dispatch_capacity" in error.where else ""
    return ""


def test_capacity_below_the_tokens_of_a_step_is_refused():
    assert "needs 768, have 512" in capacity_problem()
    assert "parallel.drop_over_capacity" in capacity_problem()
    assert capacity_problem(parallel__dispatch_capacity=768) == ""


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("drop_over_capacity", True),  # asked for
        ("all2all_backend", "allgather-reducescatter"),  # has no capacity
        ("data_parallel_size", 1),  # sends nothing
    ],
)
def test_capacity_that_cannot_drop_unasked_is_allowed(field, value):
    assert capacity_problem(**{f"parallel__{field}": value}) == ""


@pytest.mark.parametrize(("size", "allowed"), [(1, True), (16, True), (24, False), (3, False)])
def test_block_size_is_a_power_of_two(size, allowed):
    if allowed:
        check(*load_run(None, "tiny-moe", {"limits.block_size": size}))
    else:
        assert "power of two" in refusal("tiny-moe", limits__block_size=size).problem


def test_empty_capture_sizes_are_refused_unless_nothing_is_captured():
    assert "--mode none" in refusal("tiny-moe", capture__sizes=[]).problem
    check(*load_run(None, "tiny-moe", {"capture.sizes": [], "capture.policy": "none"}))


@pytest.mark.parametrize(
    ("length", "policy", "sizes", "allowed"),
    [
        (65, "full-decode-only", None, True),
        (64, "full-decode-only", None, False),
        (66, "full", None, True),
        (65, "full", None, False),
        (65, "full", [1, 256], True),
        (67, "full", [1024], False),
        (68, "full", [1024], True),
    ],
)
def test_measured_context_and_query_fit_the_length(length, policy, sizes, allowed):
    overrides = {"limits.max_model_len": length, "capture.policy": policy, "capture.sizes": sizes}
    run, model = load_run(
        None, "tiny-moe", {path: value for path, value in overrides.items() if value is not None}
    )
    if allowed:
        check(run, model)
    else:
        with pytest.raises(UnsupportedError, match="measured context of 64"):
            check(run, model)


def test_model_with_fewer_positions_is_refused():
    run, model = load_run(None, "tiny-moe")
    short = model.model_copy(update={"max_positions": 128})
    with pytest.raises(UnsupportedError, match="128 positions"):
        check(run, short)


def test_bfloat16_on_a_cpu_is_allowed():
    check(*load_run(None, "tiny-moe", {"measure.device": "cpu", "model.dtype": "bfloat16"}))


def test_block_larger_than_the_length_is_refused():
    error = refusal("tiny-moe", limits__block_size=1024, limits__max_model_len=512)
    assert "1024 is above max_model_len 512" in error.problem


@pytest.mark.parametrize(
    ("policy", "blocks", "found"),
    [
        ("none", 32, "need 33"),
        ("none", 33, None),
        ("full-decode-only", 40, "need 41"),
        ("full-decode-only", 41, None),
    ],
)
def test_too_few_blocks_are_refused_with_the_number_that_is_enough(policy, blocks, found):
    overrides = {
        "limits.max_model_len": 512,
        "limits.max_num_seqs": 8,
        "limits.num_gpu_blocks_override": blocks,
        "capture.policy": policy,
    }
    run, model = load_run(None, "tiny-moe", overrides)
    if found is None:
        check(run, model)
    else:
        with pytest.raises(UnsupportedError, match=found):
            check(run, model)


def test_fewest_samples_above_the_most_are_refused():
    error = refusal("tiny-moe", measure__min_samples=9, measure__max_samples=8)
    assert "9 is above measure.max_samples 8" in error.problem


def test_larger_ladder_asks_for_longer_queries():
    error = refusal(
        "tiny-moe",
        capture__max_size=1024,
        limits__max_num_seqs=256,
        limits__max_model_len=67,
    )
    assert "a query of 4" in error.problem


CAPTURING = ["piecewise", "full", "full-decode-only", "full-and-piecewise"]


@pytest.mark.parametrize("dbo", [False, True])
@pytest.mark.parametrize("policy", CAPTURING)
def test_exchange_that_needs_the_host_is_refused_under_every_capturing_mode(policy, dbo):
    error = refusal(
        "tiny-moe",
        parallel__all2all_backend="exact",
        capture__policy=policy,
        microbatch__enabled=dbo,
    )
    assert isinstance(error, UnsupportedError)
    assert "--all2all-backend" in error.where
    for said in (
        *("exact", f"--mode {policy}", "host sync"),
        "use allgather-reducescatter or all-to-all or symmetric-memory, or --mode none",
    ):
        assert said in error.problem


def test_exchange_that_writes_to_peers_is_refused_where_ranks_have_no_gpu():
    settings = {
        "parallel__all2all_backend": "symmetric-memory",
        "parallel__data_parallel_size": 2,
        "measure__device": "cpu",
    }
    error = refusal("tiny-moe", **settings)
    assert isinstance(error, UnsupportedError)
    assert "--all2all-backend" in error.where
    assert "use all-to-all, or another --device" in error.problem
    for field, value in (("measure__device", "auto"), ("parallel__data_parallel_size", 1)):
        changed = {path.replace("__", "."): v for path, v in (settings | {field: value}).items()}
        check(*load_run(None, "tiny-moe", changed))


@pytest.mark.parametrize("backend", ["all-to-all", "symmetric-memory"])
def test_capacity_that_would_drop_is_refused_for_both_exchanges_of_blocks(backend):
    assert "needs 768, have 512" in capacity_problem(parallel__all2all_backend=backend)


@pytest.mark.parametrize(
    "backend", ["allgather-reducescatter", "all-to-all", "symmetric-memory", "exact"]
)
def test_exchange_goes_with_the_modes_that_it_can(backend):
    for policy in ["none"] if backend == "exact" else ["none", "full", "full-decode-only"]:
        settings = {"parallel.all2all_backend": backend, "capture.policy": policy}
        check(*load_run(None, "tiny-moe", settings))
