from cgprof.record.types import RankRecord
from cgprof.report.stages import stages_table
from tests.support.runs import cuda_graph, key, stages


def test_stages_show_which_rows_were_instrumented_only_if_any_was():
    plain = stages(1_000)
    watched = plain.model_copy(update={"instrumented": True})
    mixed = cuda_graph(key(8), eager=plain, replay=watched, round_robin=None)
    table = stages_table(RankRecord(graphs=(mixed,)))
    assert [row["instrumented"] for row in table.records()] == [None, "yes"]
    assert "instrumented" in table.to_text()
    assert "instrumented" not in stages_table(RankRecord(graphs=(cuda_graph(key(8)),))).to_text()


def test_stages_show_p90_and_p99_of_launch_where_they_are_known():
    old = cuda_graph(key(8))
    assert "p90" not in stages_table(RankRecord(graphs=(old,))).to_text()
    launch = old.replay.launch.model_copy(update={"p90_ns": 21_500, "p99_ns": 29_000})
    replay = old.replay.model_copy(update={"launch": launch})
    table = stages_table(RankRecord(graphs=(old.model_copy(update={"replay": replay}),)))
    hot = next(row for row in table.records() if row["phase"] == "hot")
    assert (hot["launch_p90_ns"], hot["launch_p99_ns"]) == (21_500, 29_000)
    assert "no p99 below a hundred samples" in table.to_text()
