from cgprof.record.alone import NodeModel, StandAlone
from cgprof.record.contents import WorkDifference
from cgprof.record.graph import GraphMemory, MemoryWitness
from cgprof.record.types import RankRecord
from cgprof.record.worth import Estimate
from cgprof.report.alone import alone_table, eager_work_table
from tests.support.runs import MIB, cuda_graph, failed_graph, key, tape_graph

MODEL = NodeModel(
    base_bytes=4 * MIB,
    per_node_bytes=Estimate(value=3000, low=2500, high=3500),
    largest_error_bytes=MIB,
    fitted_on=("FULL-64x64q1", "FULL-1x1q1", "FULL-64x64q1-mb2"),
    notes=("an assumption",),
)


def alone(graph, **changes):
    facts = {
        "key": graph.key,
        "label": graph.label,
        "nodes": 602,
        "memory": GraphMemory(
            pool_by_stream={"compute": 20 * MIB}, instantiate_bytes=5 * MIB, rest_bytes=MIB
        ),
        "witness": MemoryWitness(allocator_bytes=20 * MIB, device_delta_bytes=26 * MIB),
    }
    return StandAlone(**(facts | changes))


def rows_of(table):
    return {row["key"]: row for row in table.records()}


def test_measured_keys_and_estimates_stand_side_by_side_and_are_told_apart():
    first, later = cuda_graph(key(64)), cuda_graph(key(8), delta_bytes=0)
    rank = RankRecord(graphs=(first, later), stand_alone=(alone(first),), node_model=MODEL)
    measured, estimate = rows_of(alone_table(rank)).values()
    assert measured["how"] == "measured"
    assert measured["alone_bytes"] == 26 * MIB
    assert measured["pool_bytes"] == 20 * MIB
    assert measured["driver_bytes"] == 6 * MIB
    assert measured["error_bytes"] is None
    assert estimate["how"] == "estimate"
    assert estimate["marginal_bytes"] == 0
    assert estimate["alone_bytes"] is None
    assert estimate["nodes"] == 602
    assert estimate["driver_bytes"] == 4 * MIB + 602 * 3000
    assert estimate["error_bytes"] == 2 * MIB


def test_notes_say_what_a_marginal_figure_hides_and_set_the_estimate_of_all_beside_the_run():
    graphs = [cuda_graph(key(size)) for size in (64, 8)]
    table = alone_table(RankRecord(graphs=tuple(graphs), node_model=MODEL))
    text = table.to_text()
    assert "may read 0 and still hold memory" in text
    assert "4 MiB and 3000 B a node [2500, 3500]" in text
    both = (4 * MIB + 2 * 602 * 3000) / MIB
    taken = sum(g.memory.instantiate_bytes + g.memory.rest_bytes for g in graphs) / MIB
    assert f"estimate {both:.2f} MiB +- 2 MiB; measured in this run {taken:.2f} MiB" in text
    assert "an assumption" in text


def test_key_that_failed_alone_is_estimated_and_says_why():
    graph = cuda_graph(key(64))
    failed = StandAlone(key=graph.key, label=graph.label, nodes=0, failure="was killed by SIGKILL")
    rank = RankRecord(graphs=(graph,), stand_alone=(failed,), node_model=MODEL)
    (row,) = rows_of(alone_table(rank)).values()
    assert row["how"] == "estimate"
    assert row["remark"] == "not measured: was killed by SIGKILL"
    (row,) = rows_of(alone_table(rank.model_copy(update={"node_model": None}))).values()
    assert row["how"] is None
    assert row["driver_bytes"] is None
    assert row["remark"] == "not measured: was killed by SIGKILL"


def test_negative_growth_is_never_shown_as_usage():
    graph = cuda_graph(key(64), delta_bytes=-MIB)
    given_back = MemoryWitness(allocator_bytes=0, device_delta_bytes=-4 * MIB)
    rank = RankRecord(graphs=(graph,), stand_alone=(alone(graph, witness=given_back),))
    (row,) = rows_of(alone_table(rank)).values()
    assert row["marginal_bytes"] is None
    assert row["alone_bytes"] is None
    assert row["remark"] == "memory was released meanwhile"


def test_tape_shows_bytes_of_its_arena_and_says_so():
    graph = tape_graph(key(8))
    on_tape = alone(
        graph,
        memory=GraphMemory(pool_by_stream={"arena": 4096}),
        witness=MemoryWitness(allocator_bytes=4096),
    )
    table = alone_table(RankRecord(graphs=(graph,), stand_alone=(on_tape,)))
    (row,) = rows_of(table).values()
    assert row["alone_bytes"] == 4096
    assert row["driver_bytes"] is None
    assert "no GPU memory" in table.to_text()
    assert "device delta" not in table.to_text()


def test_failed_graphs_and_keys_of_which_nothing_is_known_have_no_row():
    rank = RankRecord(graphs=(cuda_graph(key(64)), failed_graph(key(8))))
    assert alone_table(rank).rows == ()
    rank = rank.model_copy(update={"node_model": MODEL})
    assert set(rows_of(alone_table(rank))) == {"FULL-64x64q1"}


def test_work_is_shown_with_counts_and_the_names_behind_them():
    found = {
        "a": WorkDifference(equal=True),
        "b": WorkDifference(
            equal=False,
            missing={"gemm": 48, "norm": 2},
            surplus={"x" * 200: 1},
            excepted={"reduce": "a reason"},
        ),
        "c": WorkDifference(note="was killed"),
    }
    rows = rows_of(eager_work_table(RankRecord(against_eager=found)))
    assert [row["equal"] for row in rows.values()] == ["yes", "NO", "not compared"]
    assert rows["a"]["missing_count"] == 0
    assert rows["b"]["missing_count"] == 50
    assert rows["b"]["missing"] == "48 x gemm, 2 x norm"
    assert len(rows["b"]["surplus"]) < 80
    assert rows["b"]["excepted"] == "reduce: a reason"
    assert rows["c"]["missing_count"] is None
    assert rows["c"]["note"] == "was killed"


def test_what_another_process_took_meanwhile_is_in_no_figure_of_a_key():
    witness = MemoryWitness(
        allocator_bytes=MIB,
        device_delta_bytes=900 * MIB,
        nvml_delta_bytes=6 * MIB,
        neighbours="moved",
    )
    graph = cuda_graph(key(64), delta_bytes=900 * MIB, witness=witness)
    table = alone_table(RankRecord(graphs=(graph,), node_model=MODEL))
    assert rows_of(table)[graph.label]["marginal_bytes"] == 6 * MIB
    assert "measured in this run" not in table.to_text()


def test_estimate_below_zero_is_no_usage_and_says_what_the_line_gives_and_the_most_it_may_be():
    few = cuda_graph(key(8), nodes={"kernel": 10})
    sunk = MODEL.model_copy(update={"base_bytes": -MIB})
    table = alone_table(RankRecord(graphs=(few, cuda_graph(key(64))), node_model=sunk))
    low, high = rows_of(table).values()
    assert (low["driver_bytes"], low["error_bytes"], low["how"]) == (None, None, "estimate")
    assert low["remark"] == "line at -995 KiB: no usage, at most 1.03 MiB"
    assert high["driver_bytes"] == -MIB + 602 * 3000 > 0
    assert high["remark"] is None
    assert " 0 B" not in table.to_text()


def test_figures_of_a_fresh_process_say_that_their_cache_is_not_the_run_s():
    table = alone_table(RankRecord(graphs=(cuda_graph(key(64)),), node_model=MODEL))
    assert "beside the least KV cache that an engine starts with" in table.to_text()
