from cgprof.record.graph import CaptureTimes
from cgprof.report.captures import captures_table, partial_line
from tests.support.runs import cuda_dbo_run, cuda_graph, cuda_run, key, run_record


def test_captures_table_has_every_part_and_every_process():
    times = CaptureTimes(warm_up_ns=1, record_ns=2, instantiate_ns=3, gc_ns=4, readings_ns=5)
    graph = cuda_graph(
        key(8),
        times=times,
        capture_process_id=22,
        timing_process_id=11,
        round_robin_process_id=22,
        parity_process_id=11,
    )
    record = run_record("cuda", (graph, cuda_graph(key(4))))
    first, second = captures_table(record.ranks[0]).records()
    assert first == {
        "key": "FULL-8x8q1",
        "warm_up_ns": 1,
        "record_ns": 2,
        "instantiate_ns": 3,
        "gc_ns": 4,
        "readings_ns": 5,
        "total_ns": 15,
        "capture_process_id": 22,
        "timing_process_id": 11,
        "round_robin_process_id": 22,
        "parity_process_id": 11,
    }
    assert {name for name, value in second.items() if value is not None} == {"key"}


def test_partial_run_says_what_was_done_and_a_finished_one_only_what_it_lacks():
    record = cuda_run(status="partial")
    first, second = record.ranks[0].graphs
    second = second.model_copy(update={"replay": None, "parity": ()})
    rank = record.ranks[0].model_copy(update={"graphs": (first, second)})
    record = record.model_copy(update={"ranks": (rank,)})
    assert partial_line(record) == (
        "run is partial: 0 of 2 planned keys not recorded; 2 captured, 1 timed, 1 checked"
    )
    assert partial_line(cuda_dbo_run()) == ""
    rank = rank.model_copy(update={"graphs": (first,)})
    lacking = record.model_copy(update={"ranks": (rank,), "status": "complete"})
    assert partial_line(lacking) == "run is complete: 1 of 2 planned keys not recorded"
