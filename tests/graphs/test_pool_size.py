import pytest

from cgprof.graphs.pool_size import moments, pool_bytes
from tests.support.builders import tiny_model, tiny_run
from tests.support.graphs import decode_key
from tests.support.kept import KEPT, kept_run

MIB = 1024**2
# Where the allocator laid tensors that are alive at once otherwise than the model does.
TOO_MUCH = {
    "h200-x2-qwen3-30b-a3b-four-ctas": 8 * MIB,
    "h200-x2-qwen3-30b-a3b-full-decode-only-dbo": 8 * MIB,
    "h200-x4-qwen3-30b-a3b-four-ctas": 2 * MIB,
    "h200-x4-qwen3-30b-a3b-full-decode-only-dbo": 2 * MIB,
}


@pytest.mark.parametrize("name", KEPT)
def test_pool_is_what_kept_runs_measured(name):
    record = kept_run(name)
    graphs = record.ranks[0].graphs
    measured = sum(graph.memory.pool_bytes for graph in graphs)
    found = pool_bytes(record.model, record.config, [graph.key for graph in graphs])
    assert found == measured + TOO_MUCH.get(name, 0)


def test_pool_grows_where_kept_runs_saw_it_grow():
    record = kept_run("h200-qwen3-30b-a3b-full-dbo")
    graphs = record.ranks[0].graphs
    keys = [graph.key for graph in graphs]
    grown = {str(graph.key): graph.memory.pool_bytes for graph in graphs if graph.memory.pool_bytes}
    assert grown == {"FULL-512x256": 38 * MIB, "FULL-256x256": 6 * MIB}
    assert pool_bytes(record.model, record.config, keys[:1]) == 38 * MIB
    at = [str(key) for key in keys].index("FULL-256x256")
    assert pool_bytes(record.model, record.config, keys[:at]) == 38 * MIB
    assert pool_bytes(record.model, record.config, keys[: at + 1]) == 44 * MIB


def test_smaller_keys_use_what_larger_ones_left():
    model, run = tiny_model(hidden_size=4096), tiny_run()
    large = pool_bytes(model, run, [decode_key(64)])
    assert pool_bytes(model, run, [decode_key(64), decode_key(8)]) == large
    assert pool_bytes(model, run, []) == 0


def test_small_tensors_share_segments_of_two_mib_and_large_ones_have_their_own():
    run = tiny_run()
    tiny = tiny_model(num_experts=0)
    assert pool_bytes(tiny, run, [decode_key(1)]) == 2 * MIB
    # 64 tokens of 262144 elements in f32 are 64 MiB: residual, norm, last sum and output, while
    # the rest is small.
    wide = tiny_model(num_experts=0, hidden_size=262144)
    assert pool_bytes(wide, run, [decode_key(64)]) == (4 * 64 + 2) * MIB


def test_twin_keeps_what_its_waiting_half_needs():
    model, run = tiny_model(), tiny_run(dbo=True)
    half = moments(model, run, decode_key(4))
    twin = moments(model, run, decode_key(8, num_microbatches=2))
    assert len(twin) == 2 * len(half)
    waiting = sum(half[-1])  # the sums of a half on their way home
    assert [sum(one) - waiting for one in twin] == 2 * [sum(one) for one in half]
