import json
from decimal import Decimal

import pytest

from cgprof.cost.contents import read_contents
from cgprof.cost.insight import look_inside
from cgprof.cost.timeline import (
    activities,
    choose_pairs,
    disagreements,
    exported,
    second_replay,
    summed,
    timelines_of,
    trace_replays,
)
from cgprof.graphs.topology import Node, contents
from cgprof.measure.clock import clock_for
from cgprof.measure.progress import Progress
from cgprof.record.samples import SampleSink
from cgprof.shapes import GraphKey, RuntimeMode
from tests.support.builders import build_engine, captured_engine, tiny_model, tiny_run
from tests.support.ranks import run_ranks
from tests.support.runs import cuda_graph, key, tape_graph
from tests.support.timelines import COPY, GEMM, PLANTED, SEND, activity, event

INSIDE = contents(
    [
        *(Node("kernel", GEMM, ()) for _ in range(3)),
        *(Node("kernel", SEND, ()) for _ in range(2)),
        *(Node(kind, "", ()) for kind in ("memset", "peer-copy", "event-record", "empty")),
    ]
)


def times(found):
    return {name: value for name, value in found.model_dump().items() if name.endswith("_ns")}


def test_sums_count_overlapping_activities_once():
    found = summed(PLANTED, INSIDE)
    assert times(found) == {
        "span_ns": 500,
        "compute_ns": 100 + 100 + 100,
        "communication_ns": 150 + 20 + 20,
        "both_ns": 50 + 50 + 10,
        "neither_ns": 500 - (260 + 20 + 100),
    }
    assert found.hidden == pytest.approx(110 / 190)
    assert (found.activities, found.transfers, found.streams) == (7, 3, 3)
    assert (found.nodes, found.agrees) == (7, True)


@pytest.mark.parametrize("role", ["compute", "communication"])
def test_replay_of_one_role_hides_nothing_and_has_no_negative_time(role):
    found = summed([activity(role, 0, 10), activity(role, 0, 0), activity(role, 15, 20)], None)
    assert (found.both_ns, found.neither_ns, found.span_ns) == (0, 5, 20)
    assert found.hidden == (None if role == "compute" else 0)
    assert (found.nodes, found.agrees) == (None, None)


def test_another_count_of_any_kind_than_the_graph_has_is_told():
    assert disagreements("a-key", PLANTED, INSIDE) == ()
    (note,) = disagreements("a-key", PLANTED[1:], INSIDE)
    assert "replay of a-key does not agree" in note
    assert "4 kernel, 1 memset, 1 peer-copy seen, 5 kernel" in note
    swapped = [*PLANTED[:-1], activity("compute", 400, 500, kind="memcpy", name=COPY)]
    assert disagreements("a-key", swapped, INSIDE)
    assert summed(swapped, INSIDE).agrees is False
    assert "were not read" in disagreements("a-key", PLANTED, None)[0]


def test_activities_have_roles_and_exact_times_and_nothing_else_is_one():
    events = [
        event(SEND, Decimal("1000000000.004"), Decimal("1.500"), stream=20),
        event("_ZN2at6native4fillEv", Decimal("1000000000.003"), 2),
        event("Memset (Device)", 1000000001, 1, category="gpu_memset"),
        event("Memcpy PtoP (Device -> Device)", 1000000002, 1, category="gpu_memcpy"),
        event(COPY, 1000000003, 1, category="gpu_memcpy"),
        event("cudaGraphLaunch", 1, 1, category="cuda_runtime"),
        {"ph": "M", "name": "process_name"},
    ]
    found = activities(events, loopback=False)
    assert [(one.kind, one.role) for one in found] == [
        ("kernel", "compute"),
        ("kernel", "communication"),
        ("memset", "compute"),
        ("peer-copy", "communication"),
        ("memcpy", "compute"),
    ]
    assert found[0].name == "at::native::fill()"
    assert found[0].start_ns == 10**12 + 3
    assert (found[1].start_ns, found[1].duration_ns, found[1].stream) == (10**12 + 4, 1500, 20)
    alone = activities(events, loopback=True)
    assert [one.role for one in alone if one.kind == "memcpy"] == ["communication"]
    assert [one.role for one in alone if one.kind != "memcpy"] == [one.role for one in found[:-1]]


def test_times_of_a_written_trace_keep_every_digit():
    written = (
        '{"traceEvents": [{"cat": "kernel", "name": "a", "ts": 9007199254740.993, "dur": 0.7}]}'
    )

    def write(path):
        with open(path, "w") as file:
            file.write(written)

    (found,) = activities(exported(write), loopback=False)
    assert (found.start_ns, found.duration_ns) == (9007199254740993, 700)
    assert json.loads(written)["traceEvents"][0]["ts"] * 1000 != found.start_ns


def test_second_of_two_replays_is_kept_from_its_start_on():
    later = [one._replace(start_ns=one.start_ns + 900, duration_ns=3) for one in PLANTED]
    found = second_replay([*PLANTED, *later])
    assert [one.start_ns for one in found] == [one.start_ns for one in PLANTED]
    assert {one.duration_ns for one in found} == {3}


def test_replays_that_are_unlike_or_not_apart_are_a_reason():
    later = [one._replace(start_ns=one.start_ns + 900) for one in PLANTED]
    assert "apart: 4 kernel, 1 memset, 1 peer-copy, then 5 kernel" in second_replay(
        [*PLANTED, *later[1:]]
    )
    assert "cannot be told apart" in second_replay([*PLANTED, *PLANTED[1:], *later, later[-1]])
    close = sorted(
        [*PLANTED, *(one._replace(start_ns=one.start_ns + 450) for one in PLANTED)],
        key=lambda one: one.start_ns,
    )
    assert "cannot be told apart" in second_replay(close)
    assert "saw nothing" in second_replay([])


def test_timelines_keep_what_was_seen_and_tell_the_rest():
    seen = {"a": list(PLANTED), "b": "no light", "c": "no light", "d": list(PLANTED[1:])}
    found = timelines_of(seen, {"a": INSIDE, "d": INSIDE})
    assert list(found.replays) == ["a", "d"]
    assert found.table.table.num_rows == 13
    assert found.notes[0] == "no timeline of b, c: no light"
    assert "replay of d does not agree" in found.notes[1]
    assert len(found.notes) == 2
    nothing = timelines_of({"a": "no light"}, {})
    assert (nothing.table, nothing.replays) == (None, {})


def test_pairs_are_twins_of_even_sizes_behind_their_plain_keys():
    sizes = (8, 16, 24, 32, 48, 64, 128, 256)
    keys = [*map(key, sizes), *(key(size, 2) for size in sizes[1:])]
    chosen = choose_pairs(keys, most=4)
    assert chosen[:2] == (key(256), key(256, 2))
    assert [one.num_tokens for one in chosen if one.is_twin] == [256, 128, 64, 16]
    assert [one.is_twin for one in chosen] == [False, True] * 4
    assert [one.num_tokens for one in choose_pairs(keys, most=1)] == [256, 256]


def test_pairs_take_odd_sizes_where_there_are_no_others_and_no_twin_without_its_plain_key():
    assert choose_pairs([key(24), key(24, 2), key(40, 2)]) == (key(24), key(24, 2))
    assert choose_pairs([key(64), key(32)]) == ()
    in_parts = GraphKey(mode=RuntimeMode.PIECEWISE, num_tokens=64, num_microbatches=2)
    assert choose_pairs([key(64), in_parts]) == ()


def test_tape_is_not_traced_and_says_nothing_about_it():
    with captured_engine(tiny_run(sizes=(8,), dbo=True)) as engine, Progress(print) as progress:
        records = [tape_graph(one) for one in engine.graphs.keys]
        before = [graph.replays for graph in engine.graphs.captured.values()]
        found = trace_replays(engine, records, {})
        assert [graph.replays for graph in engine.graphs.captured.values()] == before
        clock, sink = clock_for(engine.device), SampleSink()
        last = list(look_inside(engine, records, clock, sink, progress))[-1]
    assert (found.table, found.replays, found.notes) == (None, {}, ())
    assert last.timelines == found
    assert last.notes == ()


def traced(engine):
    """Timelines of an engine's graphs, and their contents."""
    for one in engine.plan.keys:
        engine.capture(one, lambda phase: None)
    records = [cuda_graph(one) for one in engine.graphs.keys]
    inside, _ = read_contents(engine, records)
    return trace_replays(engine, records, inside), inside


@pytest.mark.gpu
def test_loopback_copies_are_the_transfers_and_activities_are_the_nodes():
    layers = 4
    run = tiny_run(device="cuda", sizes=(4, 8), dbo=True)
    engine = build_engine(run, tiny_model(num_layers=layers))
    try:
        with engine.active():
            before = {str(one): 0 for one in engine.plan.keys}
            found, inside = traced(engine)
            after = {str(one): graph.replays for one, graph in engine.graphs.captured.items()}
    finally:
        engine.close()
    assert found.notes == ()
    assert list(found.replays) == [str(one) for one in choose_pairs(engine.plan.keys)]
    assert len(found.replays) == 4
    assert {after[label] - before[label] for label in found.replays} == {2}
    for label, replay in found.replays.items():
        microbatches = 2 if label.endswith("-mb2") else 1
        # Three tensors go to the experts and one comes back, in every layer.
        assert replay.transfers == 4 * layers * microbatches == inside[label].kinds["memcpy"]
        assert replay.agrees, (label, replay, inside[label].kinds)
        assert 0 < replay.communication_ns < replay.span_ns
        assert 0 < replay.compute_ns < replay.span_ns
        together = replay.compute_ns + replay.communication_ns - replay.both_ns
        assert together + replay.neither_ns == replay.span_ns
        assert 0 <= replay.hidden <= 1
        # A plain key is one chain; clocks of copies and of kernels may differ by a little.
        assert microbatches == 2 or replay.hidden < 0.05, replay


def traced_on_rank(ranks, run, num_layers):
    """What a rank saw: notes, replays by label, communicating nodes by label."""
    engine = build_engine(run, tiny_model(num_layers=num_layers), ranks)
    try:
        with engine.active():
            found, inside = traced(engine)
    finally:
        engine.close()
    nodes = {label: inside[label].communication for label in found.replays}
    return found.notes, found.replays, nodes


@pytest.mark.multigpu(2)
def test_each_rank_sees_its_transfers_in_the_same_keys():
    run = tiny_run(device="cuda", sizes=(4, 8), dbo=True)
    parallel = run.parallel.model_copy(update={"data_parallel_size": 2})
    run = run.model_copy(update={"parallel": parallel})
    answers = run_ranks(2, traced_on_rank, run, 4, device="cuda", limit_s=180.0)
    assert list(answers[0][1]) == list(answers[1][1])
    for notes, replays, nodes in answers:
        assert notes == ()
        assert len(replays) == 4
        for label, replay in replays.items():
            assert replay.agrees, (label, replay)
            assert replay.transfers == nodes[label] > 0
            assert replay.communication_ns > 0


@pytest.mark.parametrize(
    ("name", "kind", "role"),
    [
        ("memcpy32_post", "memcpy", "communication"),
        ("memcpy128", "memcpy", "communication"),
        ("memset32", "memset", "compute"),
        ("memcpy_like_kernel", "kernel", "compute"),
        ("my_memcpy32", "kernel", "compute"),
    ],
)
def test_copies_that_the_driver_makes_by_kernels_are_copies(name, kind, role):
    (found,) = activities([event(name, 0, 1)], loopback=True)
    assert (found.kind, found.role) == (kind, role)
