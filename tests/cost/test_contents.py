from cgprof.cost.contents import read_contents
from cgprof.record.nodes import NODES, read_nodes
from tests.support.builders import captured_engine, tiny_run
from tests.support.runs import failed_graph, tape_graph


def test_read_contents_of_a_run_holds_each_captured_key_and_skips_failed_ones(tmp_path):
    with captured_engine(tiny_run(sizes=(4, 8), dbo=True)) as engine:
        captured = dict(engine.graphs.captured)
        keys = list(captured)
        failed, *ready = keys
        records = [failed_graph(failed), *map(tape_graph, ready)]
        found, table = read_contents(engine, records)
        counts = {str(key): dict(graph.recording.nodes) for key, graph in captured.items()}
    assert list(found) == [str(key) for key in ready]
    table.write(tmp_path / NODES)
    for key in ready:
        inside, rows = found[str(key)], read_nodes(tmp_path, str(key))
        assert inside.kinds == {kind: n for kind, n in counts[str(key)].items() if n}
        assert inside.longest_path == len(rows) == inside.edges + 1
        assert sum(inside.kernels.values()) == counts[str(key)]["kernel"]
        assert all("::" in name for _, name, _ in rows)
    assert {key.num_microbatches for key in ready} == {1, 2}


def test_twin_of_a_tape_looks_up_embeddings_once_a_microbatch():
    with captured_engine(tiny_run(sizes=(8,), dbo=True)) as engine:
        plain, twin = engine.graphs.keys
        found, _ = read_contents(engine, [tape_graph(plain), tape_graph(twin)])
    shares = [found[str(key)].kernels["aten::embedding"] for key in (plain, twin)]
    assert shares == [1, 2]
