import pytest

from cgprof.record.types import DecisionCount, RankRecord
from cgprof.record.votes import VetoCount
from cgprof.report.formats import OutputFormat
from cgprof.report.frames import graphs_frame, ranks_frame
from cgprof.report.ranks import rank_tables, veto_line
from cgprof.report.sections import graphs_table
from cgprof.report.tables import report_document
from cgprof.shapes import DecisionReason, VetoReason
from tests.support.runs import MIB, cuda_graph, failed_graph, key, run_record, stages, stats

NAMES = ("ranks", "rank-memory", "rank-replays", "rank-decisions")


def rank(index, launch_ns, **facts):
    replay = stages(launch_ns, 4_000_000).model_copy(update={"vote": stats(100_000 * (index + 1))})
    graph = cuda_graph(
        key(8),
        replay=replay,
        delta_bytes=(4 + index) * MIB,
        replays=40,
        exchange_moved_bytes=3_000,
        exchange_needed_bytes=1_000 * (index + 1),
    )
    decisions = (DecisionCount(label="FULL-8x8q1", reason=DecisionReason.GRAPH, count=30),)
    return RankRecord(
        rank=index, graphs=(graph, failed_graph(key(4))), decisions=decisions, **facts
    )


def ranks_run(*, dbo=True, vetoes=(), recorder="cuda"):
    ranks = [rank(index, ns, vetoes=vetoes) for index, ns in enumerate((10_000, 40_000, 20_000))]
    return run_record(recorder, ()).model_copy(
        update={"ranks": tuple(ranks), "config": run_record(recorder, (), dbo=dbo).config}
    )


def table(record, name):
    return next(one for one in rank_tables(record) if one.name == name)


def test_times_have_least_median_and_most_of_the_ranks():
    rows = {(one["key"], one["stage"]): one for one in table(ranks_run(), "ranks").records()}
    launch = rows["FULL-8x8q1", "launch"]
    assert [launch[f"{name}_ns"] for name in ("min", "median", "max")] == [10_000, 20_000, 40_000]
    vote = rows["FULL-8x8q1", "vote"]
    assert [vote[f"{name}_ns"] for name in ("min", "median", "max")] == [100_000, 200_000, 300_000]
    assert [stage for _, stage in rows] == [
        *("vote", "decide", "prepare", "launch", "finish", "wait", "step", "device")
    ]


def test_memory_has_least_median_and_most_of_the_ranks():
    (row,) = table(ranks_run(), "rank-memory").records()
    assert [row[f"{name}_bytes"] for name in ("min", "median", "max")] == [
        4 * MIB,
        5 * MIB,
        6 * MIB,
    ]


def test_replays_and_decisions_have_a_column_a_rank():
    replays = table(ranks_run(), "rank-replays").records()[0]
    assert replays == {"key": "FULL-8x8q1", "rank_0": 40, "rank_1": 40, "rank_2": 40}
    (decision,) = table(ranks_run(), "rank-decisions").records()
    assert decision == {
        "reason": "graph",
        "key": "FULL-8x8q1",
        "rank_0": 30,
        "rank_1": 30,
        "rank_2": 30,
    }


def test_decisions_unlike_over_ranks_show_a_zero():
    record = ranks_run()
    odd = DecisionCount(label="NONE-9", reason=DecisionReason.NO_FIT, count=2)
    last = record.ranks[2].model_copy(update={"decisions": (odd,)})
    rows = table(
        record.model_copy(update={"ranks": (*record.ranks[:2], last)}), "rank-decisions"
    ).records()
    assert [(row["reason"], row["rank_0"], row["rank_2"]) for row in rows] == [
        ("graph", 30, 0),
        ("no-fit", 0, 2),
    ]


def test_one_rank_has_no_rows_and_its_report_no_such_blocks():
    record = run_record("cuda", (cuda_graph(key(8)),), dbo=True)
    assert all(one.rows == () for one in rank_tables(record))
    text = report_document([record]).render(OutputFormat.TEXT)
    for words in ("over 1 ranks", "by rank", "vetoed", "exchange moves"):
        assert words not in text
    assert veto_line(record) == ""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("output_format", list(OutputFormat))
def test_report_of_ranks_has_each_table_in_every_format(name, output_format):
    assert "FULL-8x8q1" in report_document([ranks_run()]).render(output_format, name)


def test_times_of_a_tape_are_labelled():
    assert "CPU stand-in" in table(ranks_run(recorder="tape"), "ranks").to_text()
    assert "CPU stand-in" not in table(ranks_run(), "ranks").to_text()


def test_vetoes_are_one_line_by_rank_and_reason():
    counts = (
        VetoCount(rank=2, reason=VetoReason.NOT_UNIFORM, count=1),
        VetoCount(rank=1, reason=VetoReason.BELOW_THRESHOLD, count=7),
        VetoCount(rank=1, reason=VetoReason.IDLE, count=2),
    )
    record = ranks_run(vetoes=counts)
    line = veto_line(record)
    assert line == (
        "splitting vetoed, steps where another rank wished it: rank 1 (below its threshold: 7, "
        "idle: 2); rank 2 (not uniform: 1)"
    )
    assert line in report_document([record]).render(OutputFormat.TEXT)


def test_no_veto_is_said_and_nothing_without_overlap():
    assert veto_line(ranks_run()) == "splitting vetoed: in no step"
    assert veto_line(ranks_run(dbo=False)) == ""


def test_graphs_show_bytes_moved_against_needed():
    shown = graphs_table(rank(1, 10_000))
    first = shown.records()[0]
    names = ("exchange_moved_bytes", "exchange_needed_bytes", "exchange_ratio")
    assert [first[name] for name in names] == [3_000, 2_000, 1.5]
    assert "needs is the least for its own tokens" in shown.to_text()


def test_frames_have_votes_bytes_and_the_spread_over_ranks():
    record = ranks_run()
    frame = graphs_frame(record)
    assert list(frame["vote_ns"].dropna()) == [100_000, 200_000, 300_000]
    assert list(frame["exchange_needed_bytes"].dropna()) == [1_000, 2_000, 3_000]
    launch = ranks_frame(record).query("stage == 'launch'").iloc[0]
    assert (launch["min_ns"], launch["max_ns"]) == (10_000, 40_000)
