import dataclasses
import json

import pytest

from cgprof.config.schema import MicrobatchConfig, RunConfig
from cgprof.graphs.estimate import bytes_of_nodes
from cgprof.record.alone import NodeModel, StandAlone
from cgprof.record.contents import GraphContents, WorkDifference
from cgprof.record.cost import CurvePoint, LaunchModel, LaunchTerm, ReplayCost
from cgprof.record.store import read_run
from cgprof.record.types import DecisionCount
from cgprof.record.worth import Estimate
from cgprof.report.document import Document
from cgprof.report.findings import CHECKS, blind_lines, find, findings_blocks, findings_table
from cgprof.report.formats import OutputFormat
from cgprof.shapes import DecisionReason
from tests.support.kept import (
    KEPT,
    graph_of,
    kept_run,
    with_graph,
    with_grown,
    with_rank,
    write_as_version_2,
)
from tests.support.records import launch_stats
from tests.support.runs import cuda_graph, failed_graph, key, run_record, tape_dbo_run, totals

MIB, GIB = 1 << 20, 1 << 30
PLAIN, TWIN = "FULL-64x64q1", "FULL-64x64q1-mb2"
# What is true of the kept run; its traced calls say one thing more.
OF_KEPT = {"memory-bound-to-nodes", "never-replayed", "noisy-timing"}
OF_COSTS = {"tracing-inflates"}
OF_RANKS = {"never-replayed", "noisy-timing", "slow-host"}
SURE = Estimate(value=3000.0, low=2900.0, high=3100.0)


def exactly(value):
    return Estimate(value=value, low=value, high=value)


def names(run):
    return {finding.name for finding in find(run)}


def true_of_kept(run):
    """What the kept run itself says, in a run that still has its replay costs or not."""
    (rank,), (kept,) = run.ranks[:1], kept_run().ranks
    return OF_KEPT | (OF_COSTS if rank.replay_costs == kept.replay_costs else set())


def found(run, name):
    (finding,) = [finding for finding in find(run) if finding.name == name]
    return finding


def with_key(run, graph):
    """One more graph that took no memory that the totals would have to tell."""
    return with_rank(run, graphs=(*run.ranks[0].graphs, graph))


def unreachable_twin():
    twin = graph_of(kept_run(), "FULL-256x256q1-mb2")
    odd = dataclasses.replace(twin.key, num_tokens=512, uniform_query_len=2)
    run = with_key(
        kept_run(), twin.model_copy(update={"key": odd, "label": str(odd), "memory": None})
    )
    return run, {str(odd)}


def captured_nothing():
    return with_graph(kept_run(), PLAIN, nodes={"memcpy": 192}), {PLAIN}


def captured_nothing_and_was_refused():
    said = f"capture of {PLAIN} failed: invalid: empty, no kernel in the graph (no node at all)"
    return with_graph(kept_run(), PLAIN, nodes={}, failure=said, memory=None), {PLAIN}


def dropped_half():
    kernels = graph_of(kept_run(), TWIN).nodes["kernel"]
    return with_graph(kept_run(), TWIN, nodes={"kernel": kernels // 2, "memcpy": 192}), {TWIN}


def dropped_half_by_its_names():
    missing = {"fused_experts": 96, "attention": 48}
    unlike = {TWIN: WorkDifference(equal=False, missing=missing)}
    return with_rank(kept_run(), against_eager=unlike), {TWIN}


def lost_part_of_a_plain_key():
    return with_graph(kept_run(), PLAIN, nodes={"kernel": 300}), {PLAIN}


def other_work_than_eager():
    unlike = {
        PLAIN: WorkDifference(equal=False, surplus={"fill": 3}),
        TWIN: WorkDifference(equal=True, excepted={"copy": "loopback"}),
        "FULL-8x8q1": WorkDifference(note="not compared"),
    }
    return with_rank(kept_run(), against_eager=unlike), {PLAIN}


def failed_capture():
    said = f"capture of {PLAIN} failed: out of memory"
    return with_graph(kept_run(), PLAIN, failure=said, nodes={}), {PLAIN}


def neighbour_taking():
    run = with_grown(kept_run(), PLAIN, 2 * GIB, own=False, seen="moved")
    return run, {PLAIN}


def neighbour_giving_back():
    return with_grown(kept_run(), TWIN, -2 * GIB, own=False, seen="moved"), {TWIN}


def unexplained():
    return with_grown(kept_run(), PLAIN, 64 * MIB, own=True, seen="none"), set()


def unconfirmed_by_nvml():
    run = kept_run()
    seen = run.ranks[0].totals.twin_witness
    less = seen.model_copy(update={"nvml_delta_bytes": seen.nvml_delta_bytes - 64 * MIB})
    changed = run.ranks[0].totals.model_copy(update={"twin_witness": less})
    return with_rank(run, totals=changed), set()


def pool_of_its_own_for_each_size():
    """The same growth, moved from the driver to the pool."""
    graphs = []
    for graph in kept_run().ranks[0].graphs:
        if graph.key.num_tokens in (248, 240, 232) and not graph.key.is_twin:
            size = graph.memory.instantiate_bytes
            parts = {"pool_by_stream": {"compute": 4 * size}, "instantiate_bytes": -3 * size}
            graph = graph.model_copy(update={"memory": graph.memory.model_copy(update=parts)})
        graphs.append(graph)
    keys = {f"FULL-{size}x{size}q1" for size in (256, 248, 240, 232)}
    return with_rank(kept_run(), graphs=tuple(graphs)), keys


def over_its_limit():
    run = kept_run()
    grown = run.ranks[0].totals.plain_bytes + run.ranks[0].totals.twin_bytes
    capture = run.config.capture.model_copy(update={"max_graph_memory_bytes": grown - 1})
    config = run.config.model_copy(update={"capture": capture})
    return run.model_copy(update={"config": config}), set()


def key_that_looks_free():
    graph = graph_of(kept_run(), PLAIN)
    free = graph.witness.model_copy(update={"device_delta_bytes": 0, "nvml_delta_bytes": 0})
    return with_graph(kept_run(), PLAIN, witness=free), {PLAIN}


def event_records():
    nodes = {**graph_of(kept_run(), PLAIN).nodes, "event-record": 192}
    return with_graph(kept_run(), PLAIN, nodes=nodes), {PLAIN}


def peer_copies():
    inside = GraphContents(
        edges=1, roots=1, forks=0, joins=0, width=1, longest_path=1, peer_copies=48
    )
    none = inside.model_copy(update={"peer_copies": 0})
    return with_rank(kept_run(), contents={PLAIN: inside, TWIN: none}), {PLAIN}


def cost(measured_ns, predicted_ns):
    stats = launch_stats(measured_ns)
    predicted = exactly(predicted_ns)
    return ReplayCost(idle=stats, idle_cpu=stats, beside=stats, predicted=predicted)


def unexplained_launch():
    costs = {PLAIN: cost(10_000, 6_000.0), TWIN: cost(10_000, 12_900.0), "a": cost(10_000, 7_100.0)}
    return with_rank(kept_run(), replay_costs=costs), {PLAIN}


def loose_model():
    wide = {"scatter": 0.75, "largest_error": 1.8}
    model = LaunchModel(base_ns=exactly(4_000.0), terms=(), points=(), **wide)
    return with_rank(kept_run(), launch_model=model, replay_costs={PLAIN: cost(9_000, 9_900.0)}), {
        PLAIN
    }


def traced_at_a_price():
    stats, traced = launch_stats(9_000), launch_stats(160_000)
    one = ReplayCost(idle=stats, idle_cpu=stats, traced=traced, traced_wall=launch_stats(170_000))
    near = one.model_copy(update={"traced": launch_stats(20_000)})
    return with_rank(kept_run(), replay_costs={PLAIN: one, TWIN: near}), {PLAIN}


def throttled():
    graph = graph_of(kept_run(), TWIN)
    warnings = (*graph.warnings, "throttled: hardware thermal slowdown")
    return with_graph(kept_run(), TWIN, warnings=warnings), {TWIN}


def slow_host():
    graphs = [
        graph.model_copy(update={"host_pace_ns": 600_000 if graph.label == TWIN else 310_000})
        for graph in kept_run().ranks[0].graphs
    ]
    return with_rank(kept_run(), graphs=tuple(graphs)), {TWIN}


PLANTED = {
    unreachable_twin: "unreachable-twin",
    captured_nothing: "captured-nothing",
    captured_nothing_and_was_refused: "captured-nothing",
    dropped_half: "twin-without-its-work",
    dropped_half_by_its_names: "twin-without-its-work",
    lost_part_of_a_plain_key: "plain-without-its-work",
    other_work_than_eager: "work-not-eager",
    failed_capture: "capture-failed",
    neighbour_taking: "neighbours",
    neighbour_giving_back: "neighbours",
    unexplained: "unexplained-memory",
    unconfirmed_by_nvml: "nvml-disagrees",
    over_its_limit: "over-the-memory-limit",
    pool_of_its_own_for_each_size: "pool-not-shared",
    key_that_looks_free: "cold-arenas",
    event_records: "event-record-nodes",
    peer_copies: "peer-copies",
    unexplained_launch: "launch-unexplained",
    loose_model: "launch-model-loose",
    traced_at_a_price: "tracing-inflates",
    throttled: "throttled-clocks",
    slow_host: "slow-host",
}


@pytest.mark.parametrize(("plant", "name"), PLANTED.items())
def test_what_is_planted_in_a_real_run_is_found_by_its_check_and_nothing_else_is_said(plant, name):
    run, keys = plant()
    assert names(run) == true_of_kept(run) | {name}
    finding = found(run, name)
    assert set(finding.keys) == keys
    assert finding.evidence
    assert finding.threshold
    assert finding.way_out


def blind(run):
    """Checks that had nothing to look at, by what they lacked."""
    lacking = {name: check.lacking(run) for name, check in CHECKS.items()}
    return {name: what for name, what in lacking.items() if what is not None}


# What a plant replaces is no longer there for other checks.
LACKING_WHEN_PLANTED = {"tracing-inflates", "launch-unexplained", "launch-model-loose"}


@pytest.mark.parametrize("plant", PLANTED)
def test_no_check_that_finds_something_is_said_to_have_had_nothing_to_look_at(plant):
    run, _ = plant()
    assert not names(run) & set(blind(run))
    assert set(blind(run)) <= set(blind(kept_run())) | LACKING_WHEN_PLANTED


LACKING = {
    "work-not-eager": {"against_eager": {PLAIN: WorkDifference(note="not compared")}},
    "never-replayed": {"decisions": ()},
    "unexplained-memory": {"totals": None},
    "nvml-disagrees": {"totals": None},
    "memory-bound-to-nodes": {"totals": None},
    "peer-copies": {"contents": {}},
    "launch-unexplained": {"replay_costs": {}},
    "launch-model-loose": {"launch_model": None},
    "tracing-inflates": {"replay_costs": {}},
    **{
        name: {"graphs": ()}
        for name in (
            *("captured-nothing", "twin-without-its-work", "plain-without-its-work"),
            *("capture-failed", "unreachable-twin", "pool-not-shared", "cold-arenas"),
            *("event-record-nodes", "throttled-clocks", "noisy-timing"),
        )
    },
    "neighbours": {"graphs": (), "totals": None},
}


@pytest.mark.parametrize(("name", "without"), LACKING.items())
def test_check_says_what_it_lacks_once_that_is_taken_away(name, without):
    assert name not in blind(kept_run())
    assert blind(with_rank(kept_run(), **without))[name]


def test_checks_of_a_limit_and_of_the_host_s_pace_say_what_they_lack():
    assert blind(kept_run()) == {"over-the-memory-limit": "no --max-graph-memory"}
    assert "over-the-memory-limit" not in blind(over_its_limit()[0])
    paceless = [
        graph.model_copy(update={"host_pace_ns": None}) for graph in kept_run().ranks[0].graphs
    ]
    run = with_rank(kept_run(), graphs=tuple(paceless))
    assert set(LACKING) | set(blind(run)) == set(CHECKS)
    assert blind_lines(run) == [
        f"2 of {len(CHECKS)} checks had nothing to look at:",
        "  over-the-memory-limit (no --max-graph-memory)",
        "  slow-host (pace of the host beside two keys not read)",
    ]


def test_checks_that_need_a_device_share_one_reason_on_a_tape():
    lines = blind_lines(tape_dbo_run())
    (line,) = [line for line in lines if line.endswith(" (recorder tape: no device)")]
    assert "cold-arenas, event-record-nodes, peer-copies, launch-unexplained" in line
    assert "noisy-timing" not in " ".join(lines)


def test_every_check_has_something_planted_for_it():
    assert set(CHECKS) == OF_KEPT | OF_COSTS | set(PLANTED.values())


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("h200-qwen3-30b-a3b-full-dbo", OF_KEPT),
        ("h200-x2-qwen3-30b-a3b-four-ctas", OF_RANKS),
        ("h200-x2-qwen3-30b-a3b-full-decode-only-dbo", OF_RANKS),
        ("h200-x2-qwen3-30b-a3b-ranks", {"noisy-timing", "slow-host"}),
        (
            "h200-x2-qwen3-30b-a3b-ranks-mixing",
            {"noisy-timing", "slow-host", "event-record-nodes"},
        ),
        ("h200-x4-qwen3-30b-a3b-four-ctas", OF_RANKS),
        ("h200-x4-qwen3-30b-a3b-full-decode-only-dbo", OF_RANKS),
        ("h200-x4-qwen3-30b-a3b-launch-1-rank", {"never-replayed", "noisy-timing"}),
        ("h200-x4-qwen3-30b-a3b-launch-4-ranks", OF_RANKS),
        (
            "h200-x4-smollm2-8-experts-full-dbo-gsm8k",
            {"unexplained-memory", "memory-bound-to-nodes", "cold-arenas"},
        ),
        ("h200-qwen3-30b-a3b-full-decode-only-dbo", OF_KEPT | OF_COSTS),
        ("h200-qwen3-30b-a3b-full-decode-only-dbo-loud-host", OF_KEPT | OF_COSTS | {"slow-host"}),
        ("h200-smollm2-8-experts-full-dbo-gsm8k", {"memory-bound-to-nodes", "cold-arenas"}),
        (
            "h200-smollm2-8-experts-full-dbo-piqa",
            {"neighbours", "memory-bound-to-nodes", "cold-arenas"},
        ),
    ],
)
def test_kept_runs_are_told_what_is_true_of_them_and_no_fault(folder, expected):
    assert names(kept_run(folder)) == expected
    assert all(finding.severity != "fault" for finding in find(kept_run(folder)))


def test_every_kept_run_is_looked_at():
    assert len(KEPT) == 14


def test_tracing_of_the_kept_run_is_told_with_its_worst_key():
    tracing = found(kept_run(), "tracing-inflates")
    costs = kept_run().ranks[0].replay_costs
    inflated = {label: c.traced.median_ns / c.idle.median_ns for label, c in costs.items()}
    assert set(tracing.keys) == {label for label, share in inflated.items() if share > 3}
    assert tracing.evidence["worst"] == max(inflated, key=inflated.get)


def test_folder_of_schema_version_2_is_told_the_same_but_of_what_it_does_not_hold(tmp_path):
    write_as_version_2(tmp_path)
    assert names(read_run(tmp_path)) == OF_KEPT


def test_neighbour_is_told_apart_from_what_this_process_took():
    evidence = found(neighbour_taking()[0], "neighbours").evidence
    assert evidence["this_process_bytes"] == 274 * MIB
    assert evidence["taken_by_others_bytes"] == 2 * GIB
    back = found(neighbour_giving_back()[0], "neighbours").evidence
    assert back["this_process_bytes"] == 274 * MIB
    assert back["given_back_bytes"] == 2 * GIB
    assert "taken_by_others_bytes" not in back


def test_memory_of_nodes_is_judged_by_this_process_alone_when_neighbours_moved():
    quiet = found(kept_run(), "memory-bound-to-nodes").evidence
    assert quiet["driver_bytes"] == 246 * MIB
    assert found(neighbour_taking()[0], "memory-bound-to-nodes").evidence == quiet


def test_memory_of_a_pool_that_outweighs_the_driver_is_not_bound_to_nodes():
    graphs = (cuda_graph(key(64)), cuda_graph(key(8)))
    run = run_record("cuda", graphs, rank_totals=totals("device", 320 * MIB, 0), ranks=())
    assert "memory-bound-to-nodes" not in names(run)


def test_memory_that_the_first_graph_took_alone_does_not_grow_with_nodes():
    run = kept_run()
    rank = run.ranks[0]
    still = {"device_delta_bytes": 2, "nvml_delta_bytes": 2}
    graphs = [
        g.model_copy(update={"witness": g.witness.model_copy(update=still)}) for g in rank.graphs
    ]
    assert "memory-bound-to-nodes" in names(run)
    assert "memory-bound-to-nodes" not in names(with_rank(run, graphs=tuple(graphs)))


def test_event_records_are_priced_by_the_model_of_the_run_and_the_way_out_is_what_was_set():
    run, _ = event_records()
    curve = tuple(CurvePoint(nodes=n, ns=exactly(ns)) for n, ns in ((100, 1e6), (200, 3e6)))
    term = LaunchTerm(kind="event-record", ns_per_node=exactly(5e4), curve=curve)
    model = LaunchModel(base_ns=SURE, terms=(term,), points=())
    nodes = NodeModel(
        base_bytes=0.0, per_node_bytes=SURE, largest_error_bytes=0, fitted_on=(PLAIN,)
    )
    run = with_rank(
        run, launch_model=model, node_model=nodes, replay_costs={PLAIN: cost(4_100_000, 4.0e6)}
    )
    finding = found(run, "event-record-nodes")
    assert finding.evidence["predicted_of_them_ns"] == 2_840_000
    assert finding.evidence["launch_measured_ns"] == 4_100_000
    assert (
        finding.evidence["estimated_bytes"] == bytes_of_nodes({"event-record": 192}) > 192 * 50_000
    )
    assert "mixing is off" in finding.way_out
    parallel = run.config.parallel.model_copy(update={"nccl_graph_mixing": True})
    mixing = run.model_copy(update={"config": run.config.model_copy(update={"parallel": parallel})})
    assert "--nccl-graph-mixing" in found(mixing, "event-record-nodes").way_out
    assert "NCCL_GRAPH_MIXING_SUPPORT=0" in found(mixing, "event-record-nodes").way_out


@pytest.mark.parametrize(
    ("nodes", "ns"), [(0, 0), (50, 500), (100, 1000), (150, 2000), (200, 3000), (300, 4000)]
)
def test_term_follows_its_curve_and_goes_on_by_its_slope(nodes, ns):
    curve = (CurvePoint(nodes=100, ns=exactly(1000)), CurvePoint(nodes=200, ns=exactly(3000)))
    term = LaunchTerm(kind="event-record", ns_per_node=exactly(10), curve=curve)
    assert term.of(nodes).value == ns
    straight = LaunchTerm(kind="kernel", ns_per_node=exactly(10))
    assert straight.of(nodes).value == 10 * nodes


def test_key_that_looks_free_has_its_figure_alone_beside_it():
    run, _ = key_that_looks_free()
    graph = graph_of(run, PLAIN)
    alone = graph.witness.model_copy(update={"device_delta_bytes": 30 * MIB})
    model = NodeModel(
        base_bytes=0.0, per_node_bytes=SURE, largest_error_bytes=0, fitted_on=(PLAIN,)
    )
    stand_alone = (StandAlone(key=graph.key, label=PLAIN, nodes=818, witness=alone),)
    finding = found(with_rank(run, stand_alone=stand_alone, node_model=model), "cold-arenas")
    assert finding.severity == "info"
    assert finding.evidence["largest_measured_alone_bytes"] == 30 * MIB
    assert finding.evidence["largest_estimated_driver_bytes"] == 818 * 3000
    sunk = model.model_copy(update={"base_bytes": -4.0 * MIB})
    evidence = found(with_rank(run, node_model=sunk), "cold-arenas").evidence
    assert "largest_estimated_driver_bytes" not in evidence  # below zero it is no usage


def test_twin_accused_by_its_counts_is_not_accused_again_by_its_names():
    run, _ = dropped_half()
    unlike = {TWIN: WorkDifference(equal=False, missing={"attention": 48})}
    run = with_rank(run, against_eager=unlike)
    assert names(run) == true_of_kept(run) | {"twin-without-its-work"}
    assert found(run, "twin-without-its-work").keys == (TWIN,)


def test_run_that_served_nothing_has_no_unused_keys_and_one_that_served_names_them():
    assert "never-replayed" not in names(with_rank(kept_run(), decisions=()))
    served = tuple(
        DecisionCount(label=graph.label, reason=DecisionReason.GRAPH, count=1)
        for graph in kept_run().ranks[0].graphs
        if graph.label != TWIN
    )
    assert found(with_rank(kept_run(), decisions=served), "never-replayed").keys == (TWIN,)


def test_nothing_found_is_one_line_besides_those_of_what_was_not_there():
    run = run_record("cuda", (), ranks=())
    (block,) = findings_blocks(run)
    first, *others = block.to_text().splitlines()
    assert first == f"findings: none of {len(CHECKS)} checks"
    assert others == blind_lines(run)
    assert others[0].startswith(f"{len(CHECKS)} of {len(CHECKS)} checks had nothing to look at")
    assert findings_table(run).rows == ()


def test_blocks_put_faults_first_and_say_where_how_much_and_what_to_do():
    run, _ = dropped_half()
    (block,) = findings_blocks(run)
    lines = block.to_text().splitlines()
    assert lines[0] == f"findings: 5 of {len(CHECKS)} checks"
    assert lines[1].startswith(f"fault: twin-without-its-work: {TWIN}, said ")
    assert lines[2].startswith("  found when ")
    assert lines[3].startswith("  way out: ")
    assert lines[4].startswith("cost: memory-bound-to-nodes: all 64 keys, driver 246 MiB, ")
    assert lines[1 + 3 * 5 :] == blind_lines(run)


def test_ranks_that_share_a_finding_are_told_in_one_place_and_rows_stay_apart():
    run = kept_run()
    ranks = [run.ranks[0].model_copy(update={"rank": number}) for number in range(3)]
    run = run.model_copy(update={"ranks": tuple(ranks)})
    (block,) = findings_blocks(run)
    lines = block.to_text().splitlines()
    assert lines[1 + 3 * 4 :] == blind_lines(run)
    assert lines[1].startswith("cost: memory-bound-to-nodes on ranks 0-2, here 0: all 64 keys")
    assert len(findings_table(run).rows) == 12


def test_table_says_what_was_not_looked_at_to_people_and_not_to_programs():
    table = findings_table(kept_run())
    assert table.to_text().splitlines()[-2:] == blind_lines(kept_run())
    document = Document(blocks=[], tables=[table], data=dict)
    assert "nothing to look at" not in document.render(OutputFormat.CSV)
    assert "nothing to look at" not in document.render(OutputFormat.JSON, "findings")


def test_table_gives_programs_raw_numbers_and_is_strict_json():
    document = Document(blocks=[], tables=[findings_table(kept_run())], data=dict)
    rows = json.loads(document.render(OutputFormat.JSON, "findings"))
    row = next(row for row in rows if row["finding"] == "memory-bound-to-nodes")
    assert (row["severity"], row["num_keys"], row["rank"]) == ("cost", 64, 0)
    assert f"driver_bytes={246 * MIB}; " in row["evidence"]
    assert "--max-graph-memory" in row["way_out"]


def test_tape_run_and_failed_keys_of_any_kind_are_read_without_device_figures():
    early = MicrobatchConfig(enabled=True, decode_token_threshold=8)
    run = tape_dbo_run(config=RunConfig(microbatch=early))
    assert names(run) == {"never-replayed"}
    assert found(run, "never-replayed").evidence["graph_memory_bytes"] is None
    run = run_record("cuda", (failed_graph(key(8)),))
    assert names(run) == {"capture-failed"}


def test_graph_memory_of_exactly_its_limit_is_within_it():
    run, _ = over_its_limit()
    finding = found(run, "over-the-memory-limit")
    assert finding.evidence["graph_memory_bytes"] == finding.evidence["limit_bytes"] + 1
    limit = finding.evidence["graph_memory_bytes"]
    capture = run.config.capture.model_copy(update={"max_graph_memory_bytes": limit})
    config = run.config.model_copy(update={"capture": capture})
    assert names(run.model_copy(update={"config": config})) == true_of_kept(run)
