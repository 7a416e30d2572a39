import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cgprof.errors import RecordError
from cgprof.record.nodes import NODE_SCHEMA, NODES, NodeTable, read_nodes
from cgprof.record.store import RunWriter
from tests.support.records import run_record

PLAIN = [("kernel", "a(int)", ()), ("memcpy", "", (0,)), ("kernel", "b", (0, 1))]
TWIN = [("kernel", "b", ()), ("event-record", "", (0,))]


def written(path, graphs):
    writer = RunWriter(path)
    writer.nodes = NodeTable(graphs)
    writer.write(run_record())
    writer.close()
    return path


def test_nodes_come_back_by_key_as_they_were(tmp_path):
    path = written(tmp_path, {"FULL-8": PLAIN, "FULL-8-mb2": TWIN, "FULL-4": []})
    assert read_nodes(path, "FULL-8") == PLAIN
    assert read_nodes(path, "FULL-8-mb2") == TWIN
    assert NODES in json.loads((path / "manifest.json").read_text())["files"]
    with pytest.raises(RecordError, match="holds no nodes of FULL-4"):
        read_nodes(path, "FULL-4")


def test_rewriting_a_run_writes_its_nodes_once(tmp_path):
    writer = RunWriter(tmp_path)
    writer.nodes = NodeTable({"FULL-8": PLAIN})
    writer.write(run_record())
    before = (tmp_path / NODES).stat()
    writer.write(run_record(status="complete"))
    after = (tmp_path / NODES).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    writer.nodes = NodeTable({"FULL-8": TWIN})
    writer.write(run_record(status="complete"))
    assert read_nodes(tmp_path, "FULL-8") == TWIN
    assert not list(tmp_path.glob("*.part"))


def test_older_nodes_do_not_outlive_a_rerun(tmp_path):
    written(tmp_path, {"FULL-8": PLAIN})
    (tmp_path / (NODES + ".part")).touch()
    RunWriter(tmp_path, force=True).write(run_record())
    assert not list(tmp_path.glob(NODES + "*"))
    assert NODES not in json.loads((tmp_path / "manifest.json").read_text())["files"]
    with pytest.raises(RecordError, match=r"nodes\.parquet is missing"):
        read_nodes(tmp_path, "FULL-8")


def test_a_run_of_the_largest_plan_is_well_under_a_megabyte(tmp_path):
    names = [f"void a_kernel<{index}, {'at::native::Functor, ' * 10}>()" for index in range(30)]
    graph = [
        (
            *(("memcpy", "") if index % 4 == 3 else ("kernel", names[index * 7 % 30])),
            tuple(sorted({index - 1, index - 1 - index * 13 % 9} & set(range(index)))),
        )
        for index in range(1500)
    ]
    path = written(tmp_path, {f"FULL-{key}x{key}q1": graph for key in range(64)})
    assert read_nodes(path, "FULL-63x63q1") == graph
    assert (path / NODES).stat().st_size < 400_000


def table(**changes):
    columns = {
        "key": pa.array(["k", "k"]).dictionary_encode(),
        "node": pa.array([0, 1], pa.int32()),
        "kind": pa.array(["kernel", "kernel"]).dictionary_encode(),
        "name": pa.array(["a", "b"]).dictionary_encode(),
        "after": pa.array([[], [0]], pa.list_(pa.int32())),
        **changes,
    }
    return pa.table({name: column for name, column in columns.items() if column is not None})


@pytest.mark.parametrize(
    "damage",
    [
        {"name": None},
        {"node": pa.array([0, 1], pa.int64())},
        {"node": pa.array([1, 0], pa.int32())},
        {"after": pa.array([[], [1]], pa.list_(pa.int32()))},
        {"after": pa.array([[], [-1]], pa.list_(pa.int32()))},
        {"after": pa.array([[], None], pa.list_(pa.int32()))},
        {"kind": pa.array(["kernel", None]).dictionary_encode()},
    ],
)
def test_damaged_nodes_are_refused(tmp_path, damage):
    pq.write_table(table(), tmp_path / NODES)
    assert table().schema.equals(NODE_SCHEMA)
    assert read_nodes(tmp_path, "k") == [("kernel", "a", ()), ("kernel", "b", (0,))]
    pq.write_table(table(**damage), tmp_path / NODES)
    with pytest.raises(RecordError, match="damaged"):
        read_nodes(tmp_path, "k")


def test_what_is_no_table_is_refused(tmp_path):
    (tmp_path / NODES).write_bytes(b"PAR1 and nothing more")
    with pytest.raises(RecordError, match=NODES):
        read_nodes(tmp_path, "k")


def test_a_folder_of_tables_is_no_file_of_nodes(tmp_path):
    (tmp_path / NODES).mkdir()
    pq.write_table(table(), tmp_path / NODES / "part.parquet")
    with pytest.raises(RecordError, match="it is no file"):
        read_nodes(tmp_path, "k")
