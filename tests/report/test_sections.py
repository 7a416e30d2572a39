from cgprof.record.types import RankRecord
from cgprof.report.sections import graphs_table
from tests.support.runs import cuda_graph, failed_graph, key, tape_graph


def cells(table, row=0):
    return table.records()[row]


def test_graphs_have_both_modes_what_bounds_a_step_and_what_is_enqueued_outside():
    graph = cuda_graph(
        key(8),
        requested_mode="FULL",
        effective_mode="FULL",
        bound="device",
        launches_outside={"kernel": 7, "memcpy": 2},
        nodes={"kernel": 3},
    )
    failed = failed_graph(key(4)).model_copy(
        update={"requested_mode": "FULL", "effective_mode": "NONE"}
    )
    table = graphs_table(RankRecord(graphs=(graph, failed)))
    assert cells(table)["kernel_nodes"] == 3
    assert cells(table)["launches_outside"] == "7 kernel, 2 memcpy"
    assert cells(table)["bound"] == "device"
    assert (cells(table, 1)["requested"], cells(table, 1)["effective"]) == ("FULL", "NONE")
    text = table.to_text()
    assert "by device: it saves host time only" in text
    assert "launch is the graph alone" in text


def test_graphs_of_a_tape_do_not_show_what_only_a_device_has():
    text = graphs_table(RankRecord(graphs=(tape_graph(key(8)),))).to_text()
    for words in ("bound by", "launches outside", "sampled peak"):
        assert words not in text
