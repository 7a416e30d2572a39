import pytest

from cgprof.config.schema import All2AllBackend
from cgprof.graphs.passes import ExchangeKind, exchange_kind, passes_of
from cgprof.shapes import GraphKey, RuntimeMode
from tests.support.builders import tiny_model, tiny_run
from tests.support.graphs import decode_key

GATHER = All2AllBackend.ALLGATHER_REDUCESCATTER


def on_ranks(run, size, **changes):
    parallel = run.parallel.model_copy(update={"data_parallel_size": size, **changes})
    return run.model_copy(update={"parallel": parallel})


def sizes(key):
    return [one.num_tokens for one in passes_of(tiny_model(), tiny_run(dbo=True), key)]


def test_plain_key_is_one_pass_and_a_twin_is_one_a_microbatch():
    assert sizes(decode_key(7)) == [7]
    assert sizes(decode_key(8, num_microbatches=2)) == [4, 4]
    assert sizes(decode_key(8, num_microbatches=3)) == [2, 2, 4]


@pytest.mark.parametrize(
    ("num_experts", "dbo", "ranks", "backend", "kind"),
    [
        (0, False, 1, All2AllBackend.ALL_TO_ALL, ExchangeKind.NONE),
        (8, False, 1, All2AllBackend.ALL_TO_ALL, ExchangeKind.NONE),
        (8, True, 1, GATHER, ExchangeKind.LOOPBACK),
        (8, False, 2, All2AllBackend.ALL_TO_ALL, ExchangeKind.ALL_TO_ALL),
        (8, True, 2, GATHER, ExchangeKind.ALL_GATHER),
        (8, True, 2, All2AllBackend.SYMMETRIC_MEMORY, ExchangeKind.PEER_WRITES),
    ],
)
def test_exchange_follows_from_model_ranks_and_backend(num_experts, dbo, ranks, backend, kind):
    run = on_ranks(tiny_run(dbo=dbo), ranks, all2all_backend=backend)
    assert exchange_kind(tiny_model(num_experts=num_experts), run) is kind


def test_rows_of_the_experts_grow_with_ranks_and_are_bounded_by_the_capacity():
    model = tiny_model(hidden_size=64, experts_per_token=2)
    (alone,) = passes_of(model, tiny_run(), decode_key(8))
    assert (alone.block_rows, alone.expert_rows) == (8, 8)
    # 8 hidden states of 256 bytes, and one row for 8 x 2 x 8 bytes of routing.
    (shared,) = passes_of(model, on_ranks(tiny_run(), 4), decode_key(8))
    assert (shared.block_rows, shared.expert_rows) == (9, 36)
    bounded = on_ranks(tiny_run(), 4, dispatch_capacity=3)
    (few,) = passes_of(model, bounded, decode_key(8))
    assert (few.block_rows, few.expert_rows) == (4, 16)
    gathered = on_ranks(tiny_run(), 4, dispatch_capacity=3, all2all_backend=GATHER)
    assert passes_of(model, gathered, decode_key(8))[0].expert_rows == 36


def test_short_batches_of_long_contexts_are_split_unless_batch_invariant():
    run = tiny_run(max_model_len=4096)
    (one,) = passes_of(tiny_model(), run, decode_key(1))
    assert one.num_splits == 16
    invariant = tiny_run(max_model_len=4096, batch_invariant=True)
    assert passes_of(tiny_model(), invariant, decode_key(1))[0].num_splits == 1
    assert passes_of(tiny_model(), tiny_run(max_model_len=256), decode_key(1))[0].num_splits == 1


def test_half_of_a_twin_is_split_as_its_own_tokens_want():
    run = tiny_run(dbo=True, max_model_len=4096)
    # Two KV heads: 66 tokens make 132 programs of 264 wanted, 67 make more than half.
    twin = decode_key(2 * 66, num_microbatches=2)
    assert [one.num_splits for one in passes_of(tiny_model(), run, twin)] == [2, 2]
    assert passes_of(tiny_model(), run, decode_key(2 * 66))[0].num_splits == 1


def test_key_of_any_lengths_is_cut_by_the_general_tile():
    mixed = GraphKey(mode=RuntimeMode.FULL, num_tokens=64, num_reqs=1)
    run = tiny_run(max_model_len=4096)
    # Tiles of 32 tokens: 2 + 1 + 1 of them, where single tokens would be 64 programs a head.
    assert passes_of(tiny_model(), run, mixed)[0].num_splits == 16
    assert passes_of(tiny_model(), run, decode_key(64))[0].num_splits == 2
