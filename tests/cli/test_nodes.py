import csv
import dataclasses
import json

import pytest
from typer.testing import CliRunner

from cgprof.cli.app import app
from cgprof.cost.contents import read_contents
from cgprof.graphs.topology import Node, contents
from cgprof.record.nodes import NodeTable
from cgprof.record.store import RunWriter
from cgprof.record.timeline import TIMELINES, TimelineTable
from cgprof.record.types import RankRecord
from tests.support.builders import captured_engine, tiny_run
from tests.support.runs import cuda_graph, failed_graph, key, run_record, tape_graph
from tests.support.timelines import PLANTED

GEMM = "void gemm<4, std::array<char*, 2ul> >(int, float*)"
SEND = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
PLAIN, TWIN, ALONE, FAILED = key(64), key(64, 2), key(32, 2), key(8)
NODES = {
    str(PLAIN): (
        Node("kernel", GEMM, ()),
        Node("kernel", SEND, (0,)),
        Node("event-record", "", (1,)),
        Node("kernel", "norm_kernel", (1,)),
    ),
    str(TWIN): (
        Node("kernel", GEMM, ()),
        Node("kernel", GEMM, (0,)),
        Node("kernel", SEND, (0,)),
        Node("peer-copy", "", (0,)),
        Node("kernel", "norm_kernel", (1,)),
        Node("kernel", "norm_kernel", (2, 3, 4)),
    ),
    str(ALONE): (Node("kernel", GEMM, ()),),
}


def run_folder(path, *, ranks=1, nodes=NODES, with_file=True, keys=(PLAIN, TWIN, ALONE)):
    graphs = (*map(cuda_graph, keys), failed_graph(FAILED, "out of memory"))
    found = {label: contents(rows) for label, rows in nodes.items()}
    records = [RankRecord(rank=rank, graphs=graphs, contents=found) for rank in range(ranks)]
    writer = RunWriter(path)
    if nodes and with_file:
        writer.nodes = NodeTable(nodes)
    writer.write(run_record("cuda", graphs, ranks=tuple(records)))
    writer.close()
    return str(path)


@pytest.fixture
def folder(tmp_path):
    return run_folder(tmp_path / "run")


def run(*args):
    return CliRunner().invoke(app, ["nodes", *args])


def shown(*args):
    result = run(*args)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def refused(*args):
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    return result.stderr


def words(text, first):
    (line,) = [line for line in text.splitlines() if line.startswith(f"{first} ")]
    return line.removeprefix(first).split()


def rows(*args):
    return list(csv.DictReader(shown(*args, "--format", "csv").splitlines()))


def test_without_a_key_there_is_one_row_a_key(folder):
    text = shown(folder)
    assert "recorder: cuda\n" in text
    assert "memsets" not in text
    #                                  nodes kernels peer-copies events other names
    assert words(text, str(PLAIN)) == ["4", "3", "0", "1", "0", "3", "3", "1", "0", "2", "3", "1"]
    assert words(text, str(TWIN)) == ["6", "5", "1", "0", "0", "3", "7", "1", "1", "3", "4", "2"]
    assert set(words(text, str(FAILED))) == {"-"}
    csv_rows = {row["key"]: row for row in rows(folder)}
    assert csv_rows[str(TWIN)]["memset"] == "0"
    assert csv_rows[str(TWIN)]["peer_copy"] == "1"
    assert csv_rows[str(FAILED)]["nodes"] == ""
    assert f"| {TWIN} | 6 | 5 |" in shown(folder, "--format", "md")
    data = json.loads(shown(folder, "--format", "json"))
    assert data["keys"][str(TWIN)]["kinds"] == {"kernel": 5, "peer-copy": 1}
    assert data["keys"][str(TWIN)]["contents"]["kernels"][GEMM] == 2


def test_a_plain_key_is_shown_with_its_kernels_by_short_name(folder):
    text = shown(folder, str(PLAIN))
    assert f"key: {PLAIN}, 4 nodes\n" in text
    assert "roots: 1, edges: 3, forks: 1, joins: 0, width: 2, longest path: 3" in text
    assert words(text, "event-record") == ["1"]
    assert words(text, "gemm") == ["1", "0"]
    assert words(text, "ncclDevKernel_SendRecv") == ["1", "0"]
    assert "plain key" not in text
    assert "'against-plain' is no table" in refused(folder, str(PLAIN), "--table", "against-plain")


def test_a_twin_is_shown_with_what_it_added_and_moved(folder):
    text = shown(folder, str(TWIN))
    assert f"kernels against the plain key {PLAIN}\n" in text
    found = {row["kernel"]: row for row in rows(folder, str(TWIN), "--table", "against-plain")}
    assert found["gemm"] == {
        "kernel": "gemm",
        "plain": "1",
        "twin": "2",
        "added": "1",
        "moved": "0",
    }
    assert found["ncclDevKernel_SendRecv"]["added"] == "0"
    assert found["ncclDevKernel_SendRecv"]["moved"] == "1"
    kinds = {row["kind"]: row for row in rows(folder, str(TWIN))}
    assert (kinds["event-record"]["nodes"], kinds["event-record"]["added"]) == ("0", "-1")
    assert kinds["kernel"] == {"kind": "kernel", "nodes": "5", "plain": "3", "added": "2"}
    assert "this run has none" in shown(folder, str(ALONE))


def test_json_of_a_key_has_every_node(folder):
    data = json.loads(shown(folder, str(TWIN), "--format", "json"))
    assert data["plain"] == str(PLAIN)
    assert data["nodes"][5] == {"kind": "kernel", "name": "norm_kernel", "after": [2, 3, 4]}
    (gemm,) = [change for change in data["against_plain"] if change["name"] == GEMM]
    assert gemm == {
        "name": GEMM,
        "plain": 1,
        "twin": 2,
        "moved": 0,
        "added": 1,
    }


def test_dot_draws_one_key(folder):
    lines = shown(folder, str(TWIN), "--format", "dot").splitlines()
    assert lines[0] == f'digraph "{TWIN}" {{'
    assert lines[-1] == "}"
    assert '  n0 [label="0 gemm", shape=box];' in lines
    assert '  n2 [label="2 ncclDevKernel_SendRecv", shape=box, style="filled,dashed"];' in lines
    assert '  n3 [label="3 peer-copy", shape=ellipse, style="filled,dashed"];' in lines
    assert [line for line in lines if line.endswith("-> n5;")] == [
        f"  n{index} -> n5;" for index in (2, 3, 4)
    ]
    assert sum("->" in line for line in lines) == 7
    assert "name a KEY" in refused(folder, "--format", "dot")


def test_trace_holds_the_replay_that_was_traced(folder, tmp_path):
    TimelineTable({str(TWIN): PLANTED}).write(tmp_path / "run" / TIMELINES)
    events = json.loads(shown(folder, str(TWIN), "--format", "trace"))["traceEvents"]
    assert sum(one["ph"] == "X" for one in events) == len(PLANTED)
    told = refused(folder, str(PLAIN), "--format", "trace")
    assert f"holds no traced replay of {PLAIN}" in told
    assert "name a KEY" in refused(folder, "--format", "trace")
    assert "name a KEY" in refused(folder, str(TWIN), "--format", "trace", "--table", "kinds")


def test_unknown_and_failed_keys_are_refused_with_the_way_out(folder):
    told = refused(folder, "FULL-64x64q1-mb3")
    assert "'FULL-64x64q1-mb3' is no key of run a1b2; near it: " in told
    assert str(TWIN) in told
    assert "its capture failed: out of memory" in refused(folder, str(FAILED))
    assert str(PLAIN) in refused(folder, "zzz")


@pytest.mark.parametrize(
    ("wanted", "near"),
    [
        ("FULL-60x60q1", ["FULL-64x64q1", "FULL-56x56q1", "FULL-64x64q1-mb2"]),
        ("FULL-60x60q1-mb2", ["FULL-64x64q1-mb2", "FULL-64x64q1", "FULL-56x56q1"]),
        ("160", ["FULL-160x160q1", "FULL-64x64q1", "FULL-64x64q1-mb2"]),
        ("FULL-1x1q1", ["FULL-8x8q1", "FULL-56x56q1", "FULL-64x64q1"]),
    ],
)
def test_keys_of_the_nearest_tokens_are_suggested(tmp_path, wanted, near):
    keys = (key(160), PLAIN, key(56), TWIN)
    told = refused(run_folder(tmp_path / "run", keys=keys), wanted)
    assert told.rstrip().endswith(f"; near it: {', '.join(near)}")


def test_of_several_ranks_the_first_is_shown_and_named(tmp_path):
    path = run_folder(tmp_path / "run", ranks=2)
    assert "rank 0 of 2: only its nodes are kept\n" in shown(path)
    assert "rank 0 of 2: only its nodes are kept\n" in shown(path, str(PLAIN))
    assert json.loads(shown(path, "--format", "json"))["num_ranks"] == 2


def test_a_run_that_read_no_nodes_shows_what_it_counted(tmp_path):
    path = run_folder(tmp_path / "run", nodes={})
    text = shown(path)
    assert "edges and kernels were not read" in text
    assert words(text, str(PLAIN))[:2] == ["602", "600"]
    assert "edges and kernels were not read" in shown(path, str(PLAIN))
    for output_format in ("json", "dot"):
        assert "nodes.parquet is missing" in refused(path, str(PLAIN), "--format", output_format)


def test_nodes_of_a_real_tape_run(tmp_path):
    with captured_engine(tiny_run(sizes=(8,), dbo=True)) as engine:
        graphs = [tape_graph(one) for one in engine.graphs.keys]
        found, table = read_contents(engine, graphs)
    writer = RunWriter(tmp_path / "run")
    writer.nodes = table
    rank = RankRecord(graphs=tuple(graphs), contents=found)
    writer.write(run_record("tape", graphs, ranks=(rank,)))
    writer.close()
    folder, plain, twin = str(tmp_path / "run"), graphs[0].label, graphs[1].label
    assert "recorder: tape, a CPU stand-in" in shown(folder)
    change = {row["kernel"]: row for row in rows(folder, twin, "--table", "against-plain")}
    assert change["aten::embedding"] == {
        "kernel": "aten::embedding",
        "plain": "1",
        "twin": "2",
        "added": "1",
        "moved": "0",
    }
    drawn = shown(folder, plain, "--format", "dot").splitlines()
    assert sum("->" in line for line in drawn) == found[plain].edges


def test_a_folder_that_holds_no_run_is_refused(tmp_path):
    assert "there is no such run folder" in refused(str(tmp_path / "nowhere"))


def test_a_twin_is_compared_with_the_plain_key_of_any_query_lengths(tmp_path):
    mixed = dataclasses.replace(PLAIN, uniform_query_len=None)
    nodes = {str(mixed): NODES[str(PLAIN)], str(TWIN): NODES[str(TWIN)]}
    folder = run_folder(tmp_path / "run", nodes=nodes, keys=(mixed, TWIN))
    assert f"kernels against the plain key {mixed}\n" in shown(folder, str(TWIN))
    assert json.loads(shown(folder, str(TWIN), "--format", "json"))["plain"] == str(mixed)


def test_a_file_of_other_nodes_than_the_run_counted_is_refused(tmp_path):
    folder = run_folder(tmp_path / "run")
    NodeTable({str(TWIN): NODES[str(TWIN)][:3]}).write(tmp_path / "run" / "nodes.parquet")
    for output_format in ("dot", "json"):
        said = refused(folder, str(TWIN), "--format", output_format)
        assert f"holds 3 nodes of {TWIN}, the run has 6" in said
