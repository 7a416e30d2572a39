import numpy as np
import pytest

from cgprof.measure.kept import keep, nothing_kept
from cgprof.record.graph import CaptureTimes, GraphMemory, MemoryWitness, ParityResult
from cgprof.record.samples import SampleSink
from tests.support.records import graph_record, run_record, stage_stats

LEG = ParityResult(leg="replay-eager", passed=True, bitwise_equal=True, replays=1)
OLD, NEW = 11, 22


def timed(num_tokens, **changes):
    facts = {
        "times": CaptureTimes(record_ns=5),
        "witness": MemoryWitness(allocator_bytes=7, device_delta_bytes=7),
        "round_robin": stage_stats(6_000),
        "experts_hit": 2.5,
        "replays": 40,
        "parity": (LEG,),
        "warnings": ("neighbour-moved: x", "noisy: y", "negative-rest: z"),
        "capture_process_id": OLD,
        "timing_process_id": OLD,
        "round_robin_process_id": OLD,
        "parity_process_id": OLD,
    }
    return graph_record(num_tokens, **(facts | changes))


def fresh(num_tokens, **changes):
    facts = {
        "eager": None,
        "replay": None,
        "capture_ns": 99,
        "memory": GraphMemory(pool_by_stream={"arena": 1}),
        "witness": MemoryWitness(allocator_bytes=1),
        "warnings": ("no-device-growth: now",),
        "capture_process_id": NEW,
    }
    return graph_record(num_tokens, **(facts | changes))


def run_of(*graphs):
    record = run_record(graphs)
    labels = tuple(graph.label for graph in graphs)
    return record.model_copy(update={"plan": record.plan.model_copy(update={"labels": labels})})


def samples_of(*graphs, phases=("eager", "first", "hot", "round-robin")):
    sink = SampleSink()
    for graph in graphs:
        for phase in phases:
            sink.append(graph.label, phase, {"launch_ns": np.arange(2, dtype=np.int64)})
    return sink


def series(sink):
    return [(row["key"], row["phase"]) for row in sink.table().to_pylist()][::2]


def test_captures_and_memory_are_the_new_ones_and_the_rest_is_kept():
    old, new = timed(8), fresh(8)
    merged = keep(run_of(old), samples_of(old).table(), ()).complete(new)
    of_capture = {
        *("capture_ns", "instantiate_ns", "times", "nodes", "memory", "witness"),
        *("capture_process_id", "sampled_peak_bytes", "failure"),
    }
    for name in type(old).model_fields:
        if name != "warnings":
            source = new if name in of_capture else old
            assert getattr(merged, name) == getattr(source, name), name
    assert merged.warnings == ("no-device-growth: now", "noisy: y")


def test_nothing_of_an_earlier_capture_is_shown_before_the_new_one():
    old = [timed(8), timed(4)]
    kept = keep(run_of(*old), samples_of(*old).table(), ())
    (waiting,) = kept.rest([kept.complete(fresh(8))])
    assert waiting.key == old[1].key
    assert waiting.replay == old[1].replay
    shown = (waiting.capture_ns, waiting.memory, waiting.witness, waiting.times)
    assert (*shown, waiting.capture_process_id) == (None,) * 5
    assert waiting.warnings == ("noisy: y",)


@pytest.mark.parametrize("unfinished", [{"replay": None}, {"failure": "planted"}])
def test_unfinished_and_failed_keys_are_not_kept_nor_are_the_turns_of_the_others(unfinished):
    old = [timed(8), timed(4, **unfinished)]
    kept = keep(run_of(*old), samples_of(*old).table(), ())
    assert [graph.key for graph in kept.graphs.values()] == [old[0].key]
    assert kept.complete(fresh(4)) == fresh(4)
    first = kept.complete(fresh(8))
    assert (first.round_robin, first.round_robin_process_id) == (None, None)
    assert series(kept.samples) == [(old[0].label, phase) for phase in ("eager", "first", "hot")]


def test_samples_of_a_key_that_was_not_yet_summed_up_are_dropped():
    old = [timed(8, round_robin=None), timed(4, eager=None, replay=None, round_robin=None)]
    kept = keep(run_of(*old), samples_of(*old, phases=("eager", "hot")).table(), ())
    assert series(kept.samples) == [(old[0].label, "eager"), (old[0].label, "hot")]


@pytest.mark.parametrize("change", [{"nodes": {"kernel": 13}}, {"failure": "planted"}])
def test_graph_that_is_another_or_fails_now_keeps_neither_figures_nor_samples(change):
    old = timed(8)
    kept = keep(run_of(old), samples_of(old).table(), ())
    new = fresh(8, **change)
    assert kept.complete(new) == new
    assert series(kept.samples) == []


def test_summary_without_samples_is_not_kept():
    old = timed(8)
    assert not keep(run_of(old), SampleSink().table(), ()).graphs


def test_new_run_keeps_nothing():
    assert nothing_kept().complete(fresh(8)) == fresh(8)
    assert nothing_kept().rest([]) == ()
