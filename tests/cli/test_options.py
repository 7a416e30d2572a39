import inspect
import json

import pytest
from typer.testing import CliRunner

from cgprof.cli.app import app
from cgprof.cli.capture import capture
from cgprof.cli.check import check
from cgprof.cli.plan import plan
from cgprof.config.flags import FLAGS


def config_of(*args: str) -> dict[str, dict[str, object]]:
    result = CliRunner().invoke(app, ["plan", "--format", "json", *args])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)["config"]


def refusal(*args: str) -> str:
    result = CliRunner().invoke(app, ["plan", *args])
    assert result.exit_code == 2
    assert result.stdout == ""
    return result.stderr


@pytest.mark.parametrize(
    ("command", "lacks"),
    [(plan, {"dbo_worth"}), (capture, set()), (check, {"parity", "dbo_worth"})],
)
def test_every_flag_is_an_option_of_the_command(command, lacks):
    names = {flag.lstrip("-").replace("-", "_") for flag in FLAGS.values()}
    assert names - inspect.signature(command).parameters.keys() == lacks


def test_flags_reach_their_settings():
    config = config_of(
        *("--model", "tiny-moe", "--mode", "FULL", "--dtype", "float16", "--device", "cpu"),
        *("--max-num-seqs", "32", "--max-num-batched-tokens", "256", "--max-model-len", "1024"),
        *("--block-size", "8", "--gpu-memory-utilization", "0.5", "--seed", "7", "--no-parity"),
        *("--num-gpu-blocks-override", "999", "--max-cudagraph-capture-size", "8"),
        *("--cudagraph-capture-sizes", "1,2", "--cudagraph-capture-sizes", "8", "--enable-dbo"),
        *("--ubatch-size", "3", "--dbo-decode-token-threshold", "4", "--twins", "band"),
        *("--dbo-prefill-token-threshold", "64", "--set", "measure.context_len=16"),
        *("--load-format", "dummy", "--no-strict", "--dbo-spread-real-tokens"),
        *("--max-graph-memory", "0.5GiB"),
    )
    limits = {
        "max_num_seqs": 32,
        "max_num_batched_tokens": 256,
        "max_model_len": 1024,
        "block_size": 8,
        "num_gpu_blocks_override": 999,
        "gpu_memory_utilization": 0.5,
    }
    assert config["limits"] == limits
    assert config["capture"] == {
        "policy": "full",
        "sizes": [1, 2, 8],
        "max_size": 8,
        "strict": False,
        "max_graph_memory_bytes": 2**29,
        "finish_graphs": True,
    }
    assert config["microbatch"]["enabled"]
    assert config["microbatch"]["num_microbatches"] == 3
    assert config["microbatch"]["decode_token_threshold"] == 4
    assert config["microbatch"]["prefill_token_threshold"] == 64
    assert config["microbatch"]["twins"] == "band"
    assert config["microbatch"]["spread_real_tokens"] is True
    assert (config["model"]["name"], config["model"]["dtype"]) == ("tiny-moe", "float16")
    assert (config["measure"]["device"], config["measure"]["context_len"]) == ("cpu", 16)
    assert (config["seed"], config["accuracy"]["parity"]) == (7, False)
    assert config["model"]["load_format"] == "dummy"


def test_set_wins_over_a_flag():
    assert config_of("--seed", "1", "--set", "seed=2")["seed"] == 2


@pytest.mark.parametrize(
    ("args", "enabled"),
    [
        ([], False),
        (["--ubatch-size", "2"], True),
        (["--no-dbo", "--ubatch-size", "2"], False),
        (["--config", "qwen3-30b-a3b"], True),
        (["--config", "qwen3-30b-a3b", "--no-dbo"], False),
    ],
)
def test_microbatches_are_on_when_asked_for(args, enabled):
    assert config_of(*args)["microbatch"]["enabled"] is enabled


@pytest.mark.parametrize(
    ("args", "found"),
    [
        (["--max-num-seqs", "many"], "integer"),
        (["--max-num-seqs", "0"], "0"),
        (["--gpu-memory-utilization", "1.5"], "1.5"),
        (["--mode", "fast"], "'fast'"),
        (["--twins", "all"], "'all'"),
        (["--dtype", "bf17"], "'bf17'"),
        (["--device", "tpu"], "'tpu'"),
        (["--all2all-backend", "nccl"], "'nccl'"),
        (["--data-parallel-size", "0"], "0"),
        (["--cudagraph-capture-sizes", "1,x"], "'x'"),
        (["--cudagraph-capture-sizes", "1,,2"], "''"),
        (["--cudagraph-capture-sizes", "0"], "0"),
        (["--ubatch-size", "1"], "1"),
        (["--dbo", "--dbo-decode-token-threshold", "1"], "1"),
        (["--max-model-len", "9999"], "9999"),
        (["--model", "nowhere"], "'nowhere'"),
        (["--config", "nowhere"], "nowhere"),
        (["--set", "limits.max_seqs=1"], "limits.max_num_seqs"),
        (["--format", "xml"], "xml"),
        (["--max-num-batched-tokens", "32"], "32 is below max_num_seqs 64"),
        (["--max-graph-memory", "much"], "'much' is not a size"),
        (["--max-graph-memory", "0MiB"], "0"),
        (["--max-graph-memory", "0.5"], "such as 0.5GiB"),
        (["--max-graph-memory", "1KiB"], "does not hold what has to stay"),
    ],
)
def test_bad_value_names_its_flag(args, found):
    message = refusal(*args)
    assert args[-2] in message
    assert found in message


def test_overlap_on_a_dense_model_is_refused():
    message = refusal("--model", "qwen3-8b", "--dbo")
    assert "no experts in this config" in message
    assert len(message.splitlines()) == 1


def test_overlap_that_can_never_engage_is_refused_in_three_ways():
    dense = refusal("--model", "qwen3-8b", "--dbo")
    exact = refusal("--mode", "full", "--dbo", "--all2all-backend", "exact")
    piecewise = refusal("--mode", "piecewise", "--dbo")
    assert "no experts in this config" in dense
    assert "host sync" in exact
    assert "piecewise graphs" in piecewise
    assert len({dense, exact, piecewise}) == 3


def test_exchange_is_refused_before_the_number_of_ranks_matters():
    message = refusal("--mode", "full", "--dbo", "--all2all-backend", "exact", "-dp", "2")
    assert "exact cannot be captured" in message


def test_flags_of_ranks_reach_their_settings():
    parallel = config_of(
        *("--all2all-backend", "allgather-reducescatter", "-dp", "1"),
        *("--verify-decisions", "--nccl-graph-mixing"),
    )["parallel"]
    assert parallel["all2all_backend"] == "allgather-reducescatter"
    assert parallel["data_parallel_size"] == 1
    assert parallel["verify_decisions"] is True
    assert parallel["nccl_graph_mixing"] is True
