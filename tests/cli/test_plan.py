import csv
import io
import json
import re

import pytest
from typer.testing import CliRunner

from cgprof.cli.app import app
from cgprof.cli.plan import compact
from cgprof.config.compat import blocks_needed
from cgprof.config.load import load_run
from cgprof.config.schema import RunConfig
from cgprof.units import format_ranges


def plan(*args: str) -> str:
    result = CliRunner().invoke(app, ["plan", *args])
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def test_plan_of_decode_only_with_twins():
    text = plan("--model", "qwen3-30b-a3b", "--mode", "full-decode-only", "--dbo")
    assert "35 plain keys, 29 twins" in text
    assert "plain    1, 2, 4, 8-256 by 8\n" in text
    assert "twins    32-256 by 8\n" in text
    assert "skipped" not in text


def test_plan_of_full_skips_the_unreachable_twin():
    text = plan("--model", "qwen3-30b-a3b", "--mode", "full", "--dbo")
    assert "51 plain keys, 29 twins" in text
    skipped = [line for line in text.splitlines() if line.startswith("skipped")]
    assert len(skipped) == 1
    assert "FULL-512x256q2-mb2: unreachable" in skipped[0]


def test_mode_takes_the_upper_case_spelling():
    expected = plan("--mode", "full-decode-only")
    assert plan("--cudagraph-mode", "FULL_DECODE_ONLY") == expected
    assert "policy   full-decode-only" in expected


def test_header_names_model_policy_and_limits():
    text = plan("--model", "qwen3-8b", "--max-num-seqs", "20")
    assert text.startswith("model    qwen3-8b (qwen3, 36 layers, dense, bfloat16)\npolicy   full\n")
    assert "20 requests, 2048 tokens a step, 4096 positions" in text
    assert "dbo" not in text


@pytest.mark.parametrize("max_num_seqs", ["12", "20", "300"])
def test_exact_maximum_leaves_no_decode_batch_uncovered(max_num_seqs):
    text = plan("--model", "tiny-moe", "--max-num-seqs", max_num_seqs)
    assert f"every decode batch of 1-{max_num_seqs} requests has a graph" in text


def test_uncovered_decode_batches_are_printed_as_ranges():
    sizes = ("--cudagraph-capture-sizes", "1,2,4", "--cudagraph-capture-sizes", "8")
    text = plan("--max-num-seqs", "12", *sizes)
    assert "decode batches 9-12 have no graph and run eager" in text
    text = plan("--max-num-seqs", "20", "--max-cudagraph-capture-size", "16")
    assert "decode batches 17-20 have no graph and run eager" in text


def test_many_skipped_keys_of_one_reason_share_a_line():
    text = plan("--model", "qwen3-30b-a3b", "--dbo", "--twins", "twin-only")
    assert "skipped  29 keys of 32-256 by 8 tokens: twin policy twin-only" in text
    assert "22 plain keys, 29 twins" in text


def test_policy_none_plans_nothing():
    text = plan("--mode", "none")
    assert "0 plain keys, 0 twins" in text
    assert "decode batch" not in text


def test_json_form_is_complete():
    args = ("--model", "qwen3-30b-a3b", "--mode", "full", "--dbo", "--max-num-seqs", "128")
    document = json.loads(plan(*args, "--format", "json"))
    record = document["plan"]
    assert len(record["labels"]) == len(document["keys"])
    assert document["num_plain"] + document["num_twins"] == len(document["keys"])
    assert document["keys"][0]["num_tokens"] == 256
    assert document["keys"][-1]["num_microbatches"] == 2
    assert record["skipped"][0]["reason"].startswith("unreachable")
    assert record["policy"] == "full"
    assert record["uncovered_batches"] == []
    assert RunConfig.model_validate(document["config"]).limits.max_num_seqs == 128
    assert document["model"]["num_experts"] == 128
    assert len(document["config_fingerprint"]) == len(record["fingerprint"]) == 64


def test_refused_policy_names_the_flag():
    result = CliRunner().invoke(app, ["plan", "--mode", "piecewise", "--dbo"])
    assert result.exit_code == 2
    assert "--mode" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([7], "7"),
        ([1, 2, 3], "1, 2, 3"),
        ([4, 1, 2, 3], "1-4"),
        ([1, 2, 4, 8, 16, 24, 32, 40, 100], "1, 2, 4, 8-40 by 8, 100"),
    ],
)
def test_compact_shortens_even_steps(numbers, text):
    assert compact(numbers) == text


def test_ranges_join_neighbours():
    assert format_ranges([]) == ""
    assert format_ranges([12, 9, 10, 11, 17]) == "9-12, 17"


QWEN = ("--model", "qwen3-30b-a3b", "--mode", "full-decode-only", "--dbo")


def keys_of(*args):
    return json.loads(plan(*QWEN, *args, "--format", "json"))


def test_estimate_is_labelled_and_stands_beside_each_key_for_programs():
    text = plan(*QWEN)
    assert (
        "estimate of graph memory: 0.11 GiB plain + 0.14 GiB twins (+-30 % or 4 MiB, from H200 "
        "figures of this engine; not measured); beside it 0.08 GiB of graphs that finish steps\n"
    ) in text
    document = keys_of()
    first, twin = document["keys"][0], document["keys"][-1]
    assert (first["estimated_nodes"], first["estimated_pool_bytes"]) == (770, 28 * 2**20)
    assert twin["estimated_node_bytes"] > first["estimated_node_bytes"]
    estimate = document["estimate"]
    assert estimate["total_bytes"] == estimate["plain_bytes"] + estimate["twin_bytes"]
    assert estimate["error_share"] == 0.3
    rows = list(csv.DictReader(io.StringIO(plan(*QWEN, "--format", "csv"))))
    assert len(rows) == len(document["keys"])
    assert rows[0]["estimated_nodes"] == "770"
    assert "estimate" not in plan("--mode", "none")


def test_budget_leaves_some_twins_out_and_says_which():
    text = plan(*QWEN, "--max-graph-memory", "0.15GiB")
    assert "35 plain keys, 7 twins\n" in text
    (line,) = [line for line in text.splitlines() if line.startswith("skipped")]
    assert line == (
        "skipped  22 twins of 40, 56, 72, 80, 88, 104, 112, 120, 136-184 by 8, 200-248 by 8 "
        "tokens: left out to keep graph memory within 154 MiB (estimate with all 256 MiB)"
    )
    assert "every decode batch of 1-256 requests has a graph" in text
    document = keys_of("--max-graph-memory", "0.15GiB")
    assert document["estimate"]["total_bytes"] <= 0.15 * 2**30
    reasons = {one["label"]: one["reason"] for one in document["plan"]["skipped"]}
    assert len(reasons) == 22
    assert reasons["FULL-248x248q1-mb2"].endswith("its batches pad to FULL-256x256q1-mb2")
    assert document["plan"]["fingerprint"] != keys_of()["plan"]["fingerprint"]
    modes = {one["label"]: one["effective"] for one in document["plan"]["modes"]}
    assert modes["FULL-248x248q1-mb2"] == "NONE"


def test_smaller_budget_also_leaves_plain_keys_out_and_names_them_apart():
    text = plan(*QWEN, "--max-graph-memory", "0.1GiB")
    assert "30 plain keys, 0 twins\n" in text
    assert "skipped  5 keys of 184-248 by 16 tokens: left out" in text
    assert "skipped  29 twins of 32-256 by 8 tokens: left out" in text


def test_plan_that_pads_small_batches_far_says_how_far():
    assert "worst padding" not in plan(*QWEN)
    text = plan(*QWEN, "--max-graph-memory", "0.05GiB")
    (line,) = [line for line in text.splitlines() if line.startswith("worst padding")]
    sizes = [int(key["num_tokens"]) for key in keys_of("--max-graph-memory", "0.05GiB")["keys"]]
    batches = range(1, 257)
    worst = max(batches, key=lambda batch: (min(s for s in sizes if s >= batch) / batch, -batch))
    runs_as = min(size for size in sizes if size >= worst)
    assert line.startswith(f"worst padding: a batch of {worst} runs as {runs_as} tokens (x")


def test_strict_refuses_a_plan_that_its_budget_trims():
    args = ("plan", *QWEN, "--max-graph-memory", "0.15GiB", "--strict")
    result = CliRunner().invoke(app, args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "22 keys are left out to keep graph memory within 154 MiB" in result.stderr


def test_explained_and_searched_plans_are_trimmed_alike():
    text = plan(*QWEN, "--max-graph-memory", "0.15GiB", "--explain", "--dp-tokens", "97")
    assert "35 plain keys, 7 twins" in text
    assert "decision FULL-128x128q1-mb2 on all ranks" in text


def test_twins_that_are_estimated_to_add_nothing_are_named_all_the_same():
    text = plan("--dbo", "--mode", "full-decode-only", "--max-num-seqs", "48")
    assert "estimate of graph memory: 4 MiB plain + 0 B twins (+-30 % or 4 MiB" in text


CARD_BYTES = 24_000_000_000
WEIGHTS_BYTES = 2 * 596_049_920  # of qwen3-0.6b in bfloat16
LARGE = {
    "limits.max_num_seqs": 64,
    "limits.max_num_batched_tokens": 4096,
    "capture.sizes": (4096,),
    "capture.policy": "full",
}


def test_size_of_4096_tokens_asks_for_blocks_of_its_requests_and_fits_24_gb_by_estimate():
    run, model = load_run(None, "qwen3-0.6b", LARGE)
    blocks = max(blocks_needed(run).values())
    tokens = run.measure.context_len + 4096 // 64
    assert blocks == 1 + 64 * -(-tokens // run.limits.block_size) < 4096 // 4
    block_bytes = 2 * 2 * model.num_layers * model.num_kv_heads * model.head_dim * 16
    left = CARD_BYTES - WEIGHTS_BYTES - blocks * block_bytes
    args = ("--model", "qwen3-0.6b", "--max-num-seqs", "64", "--max-num-batched-tokens", "4096")
    args += ("--cudagraph-capture-sizes", "4096", "--num-gpu-blocks-override", str(blocks))
    document = json.loads(plan(*args, "--max-graph-memory", str(left), "--format", "json"))
    assert [key["num_tokens"] for key in document["keys"]] == [4096]
    assert 0 < document["estimate"]["total_bytes"] < left / 4

    refused = CliRunner().invoke(app, ["plan", *args, "--max-graph-memory", "1MiB"])
    assert (refused.exit_code, refused.stdout) == (2, "")
    (needed,) = re.findall(r"takes [^(]*\((\d+) bytes\) by estimate", refused.stderr)
    assert int(needed) == document["estimate"]["total_bytes"]
    assert "1 plain keys, 0 twins" in plan(*args, "--max-graph-memory", needed)
