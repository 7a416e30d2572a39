from cgprof.record.types import DecisionCount, RankRecord
from cgprof.report.headline import graph_memory, headline_lines, key_memory_bytes, measured_lines
from cgprof.shapes import DecisionReason
from tests.support.runs import (
    KIB,
    MIB,
    cuda_dbo_run,
    cuda_graph,
    cuda_run,
    failed_graph,
    key,
    run_record,
    tape_dbo_run,
    totals,
)

LOOPBACK = "exchange is a loopback: there was nothing to hide"


def test_headline_with_twins_gives_both_sizes_and_their_ratio():
    assert headline_lines(cuda_dbo_run()) == [
        "graph memory: 0.31 GiB plain -> 0.63 GiB with twins (x2.03)",
        "steps served: 34 = 30 replayed, 4 eager (no captured key fits; 4 of them split)",
        LOOPBACK,
    ]


def test_headline_counts_spread_steps_as_replays():
    run = cuda_dbo_run()
    rank = run.ranks[0]
    spread = DecisionCount(label="FULL-8x8q1-mb2", reason=DecisionReason.SPREAD, count=6)
    changed = rank.model_copy(update={"decisions": (*rank.decisions, spread)})
    lines = headline_lines(run.model_copy(update={"ranks": (changed,)}))
    assert lines[1] == (
        "steps served: 40 = 36 replayed, 4 eager (no captured key fits; 4 of them split; "
        "6 replayed a twin with spread tokens)"
    )


def test_headline_without_twins_gives_one_size_and_no_loopback():
    assert headline_lines(cuda_run()) == [
        "graph memory: 0.31 GiB",
        "steps served: 34 = 30 replayed, 4 eager (no captured key fits)",
    ]


def test_headline_of_a_tape_says_arena_in_a_small_unit():
    assert headline_lines(tape_dbo_run())[0] == (
        "graph memory, tape arena: 96 KiB plain -> 144 KiB with twins (x1.50)"
    )


def test_headline_counts_no_twin_that_failed():
    graphs = (cuda_graph(key(64)), failed_graph(key(64, 2)))
    record = run_record("cuda", graphs, rank_totals=totals("device", 320 * MIB, 0), dbo=True)
    assert headline_lines(record)[0] == "graph memory: 0.31 GiB"


def test_headline_ratio_over_nothing_is_a_dash():
    graphs = (cuda_graph(key(64)), cuda_graph(key(64, 2)))
    record = run_record("cuda", graphs, rank_totals=totals("device", 0, 64 * MIB), dbo=True)
    assert headline_lines(record)[0] == "graph memory: 0 B plain -> 0.06 GiB with twins (-)"


def test_headline_before_the_totals_is_left_out():
    record = run_record("cuda", (cuda_graph(key(64)),))
    assert graph_memory(record.ranks[0]) is None
    assert not any("graph memory" in line for line in headline_lines(record))


def test_headline_of_several_ranks_names_them():
    one = cuda_run().ranks[0]
    ranks = (one, RankRecord(rank=1, graphs=one.graphs, totals=totals("device", 640 * MIB, 0)))
    lines = headline_lines(cuda_run(ranks=ranks))
    assert lines[0] == "rank 0: graph memory: 0.31 GiB"
    assert lines[2] == "rank 1: graph memory: 0.62 GiB"


def test_key_memory_is_the_device_delta_on_cuda_and_the_arena_on_a_tape():
    cuda, tape = cuda_run(), tape_dbo_run()
    assert key_memory_bytes(cuda, cuda.ranks[0].graphs[0]) == 4 * MIB
    assert key_memory_bytes(tape, tape.ranks[0].graphs[0]) == 96 * KIB
    assert key_memory_bytes(cuda, failed_graph(key(8))) is None


def test_measured_lines_say_how_each_number_came_about():
    cuda = " ".join(measured_lines(cuda_run()))
    assert "host time from first to last enqueue, GPU idle before, median of 20 samples" in cuda
    assert "device delta around capture" in cuda
    tape = " ".join(measured_lines(tape_dbo_run()))
    assert "CPU stand-in times, never GPU times" in tape
    assert "GPU idle" not in tape
    assert "device delta" not in tape
