import pytest

from cgprof.config.schema import All2AllBackend
from cgprof.graphs.estimate import (
    ERROR_BYTES,
    ERROR_SHARE,
    arena_bytes,
    bytes_of_nodes,
    estimate_graph_memory,
    estimate_nodes,
    estimate_plan,
    num_collectives,
)
from cgprof.record.alone import ARENA_STEP_BYTES
from cgprof.shapes import CapturePolicy
from tests.support.builders import captured_engine, tiny_model, tiny_run
from tests.support.graphs import decode_key
from tests.support.kept import KEPT, kept_run

# Sizes of one kept model at which the matmul library split a matmul, besides up to 64 tokens.
SPLIT_BESIDES = {76, 80, 100, 104, 108}
MIB = 1024**2
WORST_SEEN = 0.15


def on_ranks(run, size, **changes):
    parallel = run.parallel.model_copy(update={"data_parallel_size": size, **changes})
    return run.model_copy(update={"parallel": parallel})


@pytest.mark.parametrize("name", KEPT)
def test_node_counts_are_those_of_kept_runs(name):
    record = kept_run(name)
    graphs = record.ranks[0].graphs
    assert len(graphs) >= 3
    for graph in graphs:
        layers = record.model.num_layers * graph.key.num_microbatches
        expected = estimate_nodes(record.model, record.config, graph.key)
        part = graph.key.num_tokens // graph.key.num_microbatches
        if record.model.hidden_size == 2048 and part in SPLIT_BESIDES:
            expected["kernel"] += layers
        assert expected == graph.nodes, graph.label


def test_nodes_of_the_kept_model_are_the_known_numbers():
    record = kept_run("h200-qwen3-30b-a3b-full-decode-only-dbo")
    plain = estimate_graph_memory(record.model, record.config, decode_key(256))
    assert plain.nodes == {"kernel": 578, "memcpy": 192}
    assert plain.num_nodes == 770
    twin = estimate_graph_memory(record.model, record.config, decode_key(256, num_microbatches=2))
    assert twin.nodes == {"kernel": 1156, "memcpy": 384}
    assert twin.node_bytes == 2 * plain.node_bytes
    assert (plain.pool_bytes, plain.error_share) == (28 * MIB, ERROR_SHARE)


@pytest.mark.parametrize("name", KEPT)
def test_bytes_of_kept_runs_lie_within_half_of_the_stated_error(name):
    record = kept_run(name)
    graphs = record.ranks[0].graphs
    totals = record.ranks[0].totals
    plain, both = (
        arena_bytes(
            bytes_of_nodes(graph.nodes, num_collectives(record.model, record.config, graph.key))
            for graph in some
        )
        + sum(graph.memory.pool_bytes for graph in some)
        for some in ([graph for graph in graphs if not graph.key.is_twin], graphs)
    )
    whole = estimate_plan(record.model, record.config, [graph.key for graph in graphs])
    measured = (totals.plain_witness.nvml_delta_bytes, totals.twin_witness.nvml_delta_bytes)
    for found in ((plain, both - plain), (whole.plain_bytes, whole.twin_bytes or 0)):
        assert found == pytest.approx(measured, rel=WORST_SEEN, abs=ERROR_BYTES)
    assert pytest.approx(2 * WORST_SEEN) == ERROR_SHARE


def test_plan_has_the_pool_once_and_arenas_in_whole_steps():
    model, run = tiny_model(), tiny_run(dbo=True)
    plain, twin = decode_key(8), decode_key(8, num_microbatches=2)
    both = estimate_plan(model, run, [plain, twin])
    alone = estimate_plan(model, run, [plain])
    pool = estimate_graph_memory(model, run, plain).pool_bytes
    assert alone.plain_bytes == both.plain_bytes == pool + ARENA_STEP_BYTES
    assert both.twin_bytes is not None
    assert (alone.twin_bytes, alone.total_bytes) == (None, alone.plain_bytes)
    many = estimate_plan(model, run, [decode_key(n) for n in range(200, 0, -1)])
    nodes = sum(bytes_of_nodes(estimate_nodes(model, run, decode_key(n))) for n in range(1, 201))
    assert (many.total_bytes - nodes) % ARENA_STEP_BYTES == -nodes % ARENA_STEP_BYTES
    assert nodes < many.total_bytes < nodes + 16 * MIB


def test_layers_of_each_kind_have_their_kernels():
    dense = tiny_model(num_experts=0)
    key = decode_key(8)
    assert estimate_nodes(dense, tiny_run(), key) == {"kernel": 2 + 2 * 9}
    assert estimate_nodes(tiny_model(), tiny_run(), key) == {"kernel": 2 + 2 * 12}
    uniform = tiny_model(uniform_routing=True)
    assert estimate_nodes(uniform, tiny_run(), key) == {"kernel": 2 + 2 * 13}
    split = tiny_run(max_model_len=4096)
    assert estimate_nodes(dense, split, key) == {"kernel": 2 + 2 * 10}
    wide = tiny_model(num_experts=0, hidden_size=2048)
    assert estimate_nodes(wide, tiny_run(), decode_key(64)) == {"kernel": 2 + 2 * 10}
    assert estimate_nodes(wide, tiny_run(), decode_key(65)) == {"kernel": 2 + 2 * 9}
    invariant = tiny_run(batch_invariant=True)
    assert estimate_nodes(wide, invariant, decode_key(64)) == {"kernel": 2 + 2 * 9}


def test_exchange_between_ranks_adds_its_kernels_and_states_an_error_where_it_was_measured():
    model, key = tiny_model(), decode_key(8)
    packed = on_ranks(tiny_run(dbo=True), 2)
    assert estimate_nodes(model, packed, key) == {"kernel": 2 + 2 * (12 + 4 + 2)}
    gather = {"all2all_backend": All2AllBackend.ALLGATHER_REDUCESCATTER}
    gathered = on_ranks(tiny_run(), 2, **gather)
    assert estimate_nodes(model, gathered, key) == {"kernel": 2 + 2 * (12 + 3 + 2), "memcpy": 2}
    assert estimate_graph_memory(model, packed, key).error_share == ERROR_SHARE
    assert estimate_plan(model, gathered, [key]).error_share is None


def test_graph_mixing_adds_an_event_record_a_collective_and_its_bytes():
    model, key = tiny_model(), decode_key(8, num_microbatches=2)
    quiet, mixed = (on_ranks(tiny_run(dbo=True), 2, nccl_graph_mixing=on) for on in (False, True))
    assert estimate_nodes(model, quiet, key).get("event-record") is None
    nodes = estimate_nodes(model, mixed, key)
    assert (nodes["event-record"], nodes["event-wait"]) == (2 * 2 * 2, 1)
    more = bytes_of_nodes(nodes) - bytes_of_nodes(estimate_nodes(model, quiet, key))
    assert more == 880_000 + bytes_of_nodes({"event-wait": 1})
    alone = tiny_run(dbo=True)
    alone = alone.model_copy(
        update={"parallel": alone.parallel.model_copy(update={"nccl_graph_mixing": True})}
    )
    assert "event-record" not in estimate_nodes(model, alone, key)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", [CapturePolicy.FULL, CapturePolicy.FULL_DECODE_ONLY])
@pytest.mark.parametrize(
    ("changes", "dbo"),
    [
        ({"num_experts": 0}, False),
        ({}, False),
        ({}, True),
        ({"uniform_routing": True}, True),
        ({"qk_norm": False}, True),
    ],
)
@pytest.mark.parametrize("max_model_len", [320, 4096])
def test_node_counts_are_those_of_graphs_captured_here(policy, changes, dbo, max_model_len):
    model = tiny_model(dtype="bfloat16", **changes)
    run = tiny_run(policy, dbo=dbo, device="cuda", max_model_len=max_model_len)
    with captured_engine(run, model) as engine:
        for key, captured in engine.graphs.captured.items():
            assert captured.recording.nodes == estimate_nodes(model, run, key), key
