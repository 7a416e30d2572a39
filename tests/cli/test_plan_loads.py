import csv
import io
import json

import pytest
from typer.testing import CliRunner

from cgprof.cli.app import app
from cgprof.cli.plan_loads import search_document
from cgprof.graphs.plan_record import resolve_plan
from cgprof.graphs.search import search
from cgprof.report.formats import OutputFormat
from tests.support.documents import strict

DECODE = ("--model", "qwen3-30b-a3b", "--mode", "full-decode-only")
OF_128 = (*DECODE, "--dbo", "--cudagraph-capture-sizes", "128")
SMALL = ("--model", "tiny-moe", "--mode", "full-decode-only", "--dbo", "--max-num-seqs", "8")
SMALL_DBO = (*SMALL, "--dbo-decode-token-threshold", "2")


def invoke(*args):
    return CliRunner().invoke(app, ["plan", *args])


def printed(*args):
    result = invoke(*args)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def refused(*args):
    result = invoke(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    return result.stderr


@pytest.mark.parametrize(
    ("loads", "label", "reason"),
    [
        ("63,128", "FULL-128x128q1", "empty-microbatch"),
        ("64,128", "FULL-128x128q1", "empty-microbatch"),
        ("65,128", "FULL-128x128q1-mb2", "graph"),
        ("128,128", "FULL-128x128q1-mb2", "graph"),
    ],
)
def test_explain_of_loads_around_the_start_of_the_last_microbatch(loads, label, reason):
    text = printed(*OF_128, "--explain", "--dp-tokens", loads)
    assert f"decision {label} on all ranks, reason {reason}\n" in text
    assert ("no split rank 0" in text) == (reason != "graph")
    data = json.loads(printed(*OF_128, "--explain", "--dp-tokens", loads, "--format", "json"))
    assert data["decision"]["label"] == label
    assert data["decision"]["tokens_per_rank"] == [int(load) for load in loads.split(",")]


def test_explain_and_search_know_spread_tokens():
    args = (*OF_128, "--dbo-spread-real-tokens")
    text = printed(*args, "--explain", "--dp-tokens", "63,97")
    assert "decision FULL-128x128q1-mb2 on all ranks, reason spread\n" in text
    assert "rank 0 has too few tokens to reach the last microbatch" in text
    assert "none found on which ranks would differ" in printed(*args, "--search")
    assert ", few tokens spread\n" in printed(*args)


def test_explain_shows_what_each_rank_would_do_alone():
    sizes = ("--cudagraph-capture-sizes", "8,64")
    rows = printed(*DECODE, *sizes, "--explain", "--dp-tokens", "7,64,0", "--format", "csv")
    found = list(csv.DictReader(io.StringIO(rows)))
    assert [row["alone"] for row in found] == ["FULL-8x8q1", "FULL-64x64q1", "eager"]
    assert {row["why_unsplit"] for row in found} == {"dual batch overlap is off"}
    assert "decision FULL-64x64q1" in printed(*DECODE, *sizes, "--explain", "--dp-tokens", "7,64,0")


def test_explain_takes_query_lengths_and_prompt_chunks():
    args = (*DECODE, "--dbo", "--explain", "--dp-tokens", "64,0")
    text = printed(*args, "--dp-prefill-tokens", "0,600")
    assert "reason rank-eager" in text
    assert "rank 1 has no graph for its own batch" in text
    assert "decision NONE-64" in printed(*args, "--dp-query-lens", "2")


@pytest.mark.parametrize(
    ("args", "found"),
    [
        (["--explain"], "--dp-tokens: gives --explain each rank's decode tokens"),
        (["--dp-tokens", "1,2"], "--dp-tokens: describes loads for --explain"),
        (["--dp-prefill-tokens", "1"], "--dp-tokens: describes loads for --explain"),
        (["--explain", "--search"], "give one of them"),
        (["--explain", "--dp-tokens", "1,x"], "--dp-tokens: 'x' is not a whole number"),
        (["--explain", "--dp-tokens", "1,-2"], "'-2' is not a whole number"),
        (["--explain", "--dp-tokens", "1,2", "-dp", "3"], "has the tokens of 2 ranks"),
        (["--explain", "--dp-tokens", "999"], "(--max-num-seqs): rank 0 needs 999"),
        (["--explain", "--dp-tokens", "4,5", "--dp-query-lens", "2"], "rank 1: 5 tokens are no"),
        (["--explain", "--dp-tokens", "4", "--dp-query-lens", "0"], "length 0"),
        (["--explain", "--dp-tokens", "4,5,6", "--dp-query-lens", "1,1"], "has 2 numbers for 3"),
        (
            ["--explain", "--dp-tokens", "4", "--dp-prefill-tokens", "2045"],
            "(--max-num-batched-tokens): rank 0 needs 2049",
        ),
        (["--explain", "--dp-tokens", "4", "--table", "keys"], "it has votes"),
    ],
)
def test_loads_that_cannot_be_are_refused(args, found):
    assert found in refused("--model", "tiny-moe", *args)


@pytest.mark.parametrize("question", [["--explain", "--dp-tokens", "64,64"], ["--search"]])
def test_refused_settings_are_refused_here_too(question):
    assert "no experts in this config" in refused("-m", "qwen3-8b", "--dbo", *question)
    assert "piecewise" in refused("--mode", "piecewise", "--dbo", *question)


@pytest.mark.parametrize("output_format", list(OutputFormat))
@pytest.mark.parametrize(
    "question", [["--explain", "--dp-tokens", "4,0"], ["--search", "-dp", "2"]]
)
def test_loads_print_in_every_format(question, output_format):
    text = printed(*SMALL_DBO, *question, "--format", output_format.value)
    match output_format:
        case OutputFormat.JSON:
            assert "plan_fingerprint" in strict(text)
        case OutputFormat.CSV:
            rows = list(csv.reader(io.StringIO(text)))
            assert {len(row) for row in rows} == {len(rows[0])}
            assert len(rows) == 3
        case _:
            assert "on all ranks" in text


def test_search_says_how_many_load_vectors_it_looked_at():
    text = printed(*SMALL_DBO, "--search", "--data-parallel-size", "2")
    assert "decode loads: 81 of all 81 of 0-8 tokens a rank\n" in text
    assert "loads with prompt chunks: 5000 drawn with seed 0\n" in text
    assert "looked at 5081 load vectors of 2 ranks: none found" in text


def test_search_over_many_ranks_prints_the_bound_above_which_it_draws():
    text = printed(*SMALL_DBO, "--search", "-dp", "8", "--seed", "5")
    assert "20000 drawn with seed 5 of 43046721, as they are more than 70000" in text


def test_search_prints_the_vector_that_it_found():
    from cgprof.config.load import load_run
    from cgprof.graphs.dispatch import choose, decide, eager_key

    def own_load(rank, votes, keys, config):
        decision = decide(votes, keys, config)
        if votes[rank].shape.num_tokens != 7:
            return decision
        return type(decision)(
            key=choose(votes[rank].shape, keys) or eager_key(7),
            tokens_per_rank=decision.tokens_per_rank,
            reason=decision.reason,
        )

    run, card = load_run(None, "tiny-moe", {"limits.max_num_seqs": 64, "capture.sizes": [8, 64]})
    made = resolve_plan(run, card)[1]
    result = search(made.keys, run.limits, run.microbatch, num_ranks=2, seed=0, rule=own_load)
    document = search_document(run, made, result)
    text = document.render(OutputFormat.TEXT)
    assert "[7, 9] tokens a rank" in text
    assert "problem  rank 0 decides FULL-8x8 (graph) and rank 1 FULL-64x64 (graph)" in text
    assert "votes" in text
    data = strict(document.render(OutputFormat.JSON))
    assert [shape["num_tokens"] for shape in data["finding"]["shapes"]] == [7, 9]
    assert [made["label"] for made in data["finding"]["decisions"]] == ["FULL-8x8", "FULL-64x64"]
    rows = list(csv.DictReader(io.StringIO(document.render(OutputFormat.CSV))))
    assert rows[0]["found"].startswith("rank 0 decides")
    assert result.looked_at == int(rows[0]["looked_at"])
