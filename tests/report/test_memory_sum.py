import pytest

from cgprof.record.types import RankRecord
from cgprof.report.headline import graph_memory, key_memory_bytes
from cgprof.report.memory_sum import memory_sum_table, memory_sums
from tests.support.kept import KEPT, graph_of, kept_run, with_grown
from tests.support.runs import tape_dbo_run

MIB, GIB = 1 << 20, 1 << 30
PLAIN, TWIN = "FULL-64x64q1", "FULL-64x64q1-mb2"


def rows(run):
    return {row["what"]: row for row in memory_sum_table(run.ranks[0]).records()}


@pytest.mark.parametrize("folder", KEPT)
def test_parts_and_rest_of_real_runs_are_the_device_delta_and_nothing_is_negative(folder):
    table = rows(kept_run(folder))
    assert list(table) == ["plain keys", "twins", "all"]
    for row in table.values():
        sizes = [value for name, value in row.items() if name.endswith("_bytes")]
        assert all(size is None or size >= 0 for size in sizes)
        parts = row["pool_bytes"] + row["instantiate_bytes"] + row["workspaces_bytes"]
        assert parts == row["parts_bytes"]
        released = row["released_bytes"] or 0
        assert parts + row["rest_bytes"] - released == row["device_delta_bytes"]
    for name in ("pool_bytes", "parts_bytes", "device_delta_bytes", "nvml_bytes"):
        assert table["plain keys"][name] + table["twins"][name] == table["all"][name]


def test_run_of_51_sizes_in_one_pool_adds_up():
    run = kept_run("h200-qwen3-30b-a3b-full-dbo")
    assert sum(not graph.key.is_twin for graph in run.ranks[0].graphs) == 51
    assert [row["verdict"] for row in rows(run).values()] == ["adds up"] * 3


def test_quiet_run_adds_up_in_every_row_and_its_outputs_are_beside_it():
    table = rows(kept_run())
    assert [row["verdict"] for row in table.values()] == ["adds up"] * 3
    assert table["all"]["device_delta_bytes"] == table["all"]["nvml_bytes"] == 274 * MIB
    assert (table["all"]["rest_bytes"], table["all"]["outputs_bytes"]) == (0, 8 * MIB)


def test_run_whose_neighbours_moved_is_doubtful_whatever_its_rest():
    table = rows(kept_run("h200-smollm2-8-experts-full-dbo-piqa"))
    assert {row["verdict"] for row in table.values()} == {"doubtful: neighbours moved"}
    assert table["all"]["nvml_bytes"] == 222 * MIB


@pytest.mark.parametrize(
    ("grown", "verdict"),
    [
        (0, "adds up"),
        (3 * MIB, "adds up"),
        (8 * MIB, "does not add up"),
        (-9 * MIB, "does not add up"),
    ],
)
def test_rest_above_four_mib_and_two_percent_does_not_add_up(grown, verdict):
    run = with_grown(kept_run(), PLAIN, grown, own=True, seen="none")
    assert rows(run)["all"]["verdict"] == verdict


def test_growth_between_two_keys_is_in_the_rest_of_the_whole():
    run = kept_run()
    totals = run.ranks[0].totals
    witness = totals.twin_witness
    drifted = witness.model_copy(
        update={"device_delta_bytes": witness.device_delta_bytes + 32 * MIB}
    )
    rank = run.ranks[0].model_copy(
        update={"totals": totals.model_copy(update={"twin_witness": drifted})}
    )
    twins = memory_sums(rank)[1]
    assert (twins.rest_bytes, twins.verdict) == (32 * MIB, "does not add up")


def test_memory_that_a_neighbour_gave_back_is_released_and_never_a_usage():
    run = with_grown(kept_run(), TWIN, -2 * GIB, own=False, seen="moved")
    for name in ("twins", "all"):
        row = rows(run)[name]
        assert row["device_delta_bytes"] is None
        assert row["rest_bytes"] == 0
        assert row["released_bytes"] > 2 * GIB - 200 * MIB
        assert row["verdict"] == "doubtful: neighbours moved"
    assert rows(run)["all"]["nvml_bytes"] == 274 * MIB


def test_headline_of_a_doubtful_run_says_so_and_gives_this_process_alone():
    run = with_grown(kept_run(), TWIN, -2 * GIB, own=False, seen="moved")
    said = graph_memory(run.ranks[0]).to_text()
    assert said.startswith("graph memory: 0.11 GiB plain -> 1.73 GiB released with twins (-)")
    assert said.endswith("; doubtful: neighbours moved, this process by NVML: 0.27 GiB")
    assert "doubtful" not in graph_memory(kept_run().ranks[0]).to_text()
    graph = graph_of(run, TWIN)
    assert graph.witness.device_delta_bytes < 0
    assert key_memory_bytes(run, graph) is None
    assert key_memory_bytes(run, graph_of(run, PLAIN)) > 0


def test_delta_below_zero_is_doubtful_where_no_neighbour_is_seen():
    run = with_grown(kept_run(), TWIN, -2 * GIB, own=False, seen="unknown")
    assert rows(run)["all"]["verdict"] == "doubtful: memory was released"


def test_tape_has_arena_bytes_and_no_device():
    table = memory_sum_table(tape_dbo_run().ranks[0])
    for row in table.records():
        assert row["verdict"] == "tape: arena bytes, no device"
        assert row["pool_bytes"] == row["parts_bytes"] > 0
        for name in ("instantiate_bytes", "rest_bytes", "device_delta_bytes", "nvml_bytes"):
            assert row[name] is None
    assert "nothing of this is GPU memory" in table.to_text()


def test_rank_without_totals_has_no_rows():
    assert memory_sum_table(RankRecord()).rows == ()
