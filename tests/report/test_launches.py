from cgprof.record.cost import LaunchModel, ReplayCost
from cgprof.record.types import RankRecord
from cgprof.record.worth import Estimate
from cgprof.report.launches import launches_table, what_dominates
from tests.support.records import launch_stats
from tests.support.runs import cuda_graph, failed_graph, key, tape_graph

SURE = Estimate(value=4_000.0, low=3_900.0, high=4_100.0)
IDLE = {"p90_ns": 12_000, "p99_ns": 15_000, "count": 100}


def cost(**changes):
    fields = {
        "idle": launch_stats(10_000, **IDLE),
        "idle_cpu": launch_stats(9_000, p90_ns=9_500),
        "busy": launch_stats(20_000, p90_ns=22_000),
        "busy_cpu": launch_stats(19_000),
        "traced": launch_stats(8_000, p90_ns=8_500),
    }
    return ReplayCost(**{**fields, **changes})


def rank_of(graphs, **costs):
    return RankRecord(graphs=graphs, replay_costs=costs)


def test_launches_have_every_time_of_a_key_under_its_own_name():
    graph = cuda_graph(key(8))
    estimate = Estimate(value=9_876.4, low=9_000.0, high=11_000.0)
    costs = {graph.label: cost(predicted=estimate)}
    graphs = (graph, cuda_graph(key(4)), failed_graph(key(2)))
    (row,) = launches_table(rank_of(graphs, **costs), "cuda").records()
    expected = {
        "key": graph.label,
        "first_ns": 300_000,
        "hot_ns": 20_000,
        "round_robin_ns": 40_000,
        "idle_ns": 10_000,
        "idle_p90_ns": 12_000,
        "idle_p99_ns": 15_000,
        "samples": 100,
        "idle_cpu_ns": 9_000,
        "idle_cpu_p90_ns": 9_500,
        "idle_cpu_p99_ns": None,
        "busy_ns": 20_000,
        "busy_p90_ns": 22_000,
        "busy_cpu_ns": 19_000,
        "traced_ns": 8_000,
        "traced_p90_ns": 8_500,
        "hot_p90_ns": None,
        "predicted_ns": 9_876,
    }
    assert {name: row[name] for name in expected} == expected


def test_launches_of_a_gpu_say_how_each_time_is_made():
    graph = cuda_graph(key(8))
    text = launches_table(rank_of((graph,), **{graph.label: cost()}), "cuda").to_text()
    for words in (
        "the device synchronised before each",
        "the calling thread's CPU time",
        "one replay enqueued just before it",
        "CUPTI's runtime API records alone",
    ):
        assert words in text
    for words in ("stand-in", "no busy", "not traced", "estimate"):
        assert words not in text


def test_launches_of_a_tape_are_stand_ins_and_say_what_is_missing_and_why():
    graphs = tuple(tape_graph(key(size)) for size in (8, 4, 2))
    missing = {"busy": None, "busy_cpu": None, "traced": None, "busy_note": "no\nqueue"}
    costs = {graph.label: cost(**missing) for graph in graphs}
    costs[graphs[2].label] = cost(**missing, traced_note="CUPTI is not installed")
    text = launches_table(rank_of(graphs, **costs), "tape").to_text()
    assert "CPU stand-in times (tape), never GPU times" in text
    assert "no busy: no queue" in text.splitlines()
    assert f"not traced: CUPTI is not installed ({graphs[2].label})" in text
    header = next(line for line in text.splitlines() if line.startswith("key"))
    assert "idle" in header
    assert "busy" not in header
    assert "traced" not in header


def test_what_dominates_names_each_term_once_with_its_keys():
    graphs = tuple(cuda_graph(key(size)) for size in (8, 4, 2))
    words = "192 event records: {} of 50 us ({}%); leave mixing out"
    few, many = (cost(dominated_by=words.format(*told)) for told in (("30 us", 60), ("40 us", 80)))
    costs = {graphs[0].label: few, graphs[1].label: many, graphs[2].label: cost()}
    rank = rank_of(graphs, **costs)
    (note,) = what_dominates(rank)
    assert note == (
        "the model's estimate is mostly 192 event records; leave mixing out (60 to 80% of it, "
        "2 of 3 keys)"
    )
    loose = LaunchModel(base_ns=SURE, terms=(), points=(), scatter=0.75)
    (doubted,) = what_dominates(rank.model_copy(update={"launch_model": loose}))
    assert doubted == f"{note}; the model is loose in this run"
    assert note in launches_table(rank, "cuda").notes


def test_launches_without_costs_have_no_rows_and_no_notes():
    table = launches_table(rank_of((cuda_graph(key(8)),)), "cuda")
    assert (table.rows, table.notes) == ((), ())


def test_steps_of_an_earlier_process_are_told_apart_from_calls_of_this_one():
    ours, theirs = (cuda_graph(key(8), timing_process_id=process_id) for process_id in (7, 5))
    costs = {ours.label: cost(process_id=7)}
    assert "earlier process" not in launches_table(rank_of((ours,), **costs), "cuda").to_text()
    assert "earlier process" in launches_table(rank_of((theirs,), **costs), "cuda").to_text()
