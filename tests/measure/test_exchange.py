import pytest

from cgprof.config.schema import All2AllBackend
from cgprof.measure.exchange import Traffic, exchange_traffic, microbatch_tokens
from cgprof.moe.traffic import RowFormat, bytes_moved
from cgprof.shapes import CapturePolicy
from tests.support.builders import build_engine, tiny_model, tiny_run
from tests.support.ranks import run_ranks
from tests.support.stepping import full_key

# Those that ranks on CPUs have.
BACKENDS = [b for b in All2AllBackend if b is not All2AllBackend.SYMMETRIC_MEMORY]
ROW = RowFormat(hidden_size=32, itemsize=4, top_k=2)


def traffic(ranks, run):
    engine = build_engine(run, ranks=ranks)
    try:
        with engine.active():
            keys = [full_key(8), full_key(8, 2)]
            found = [exchange_traffic(engine, key, engine.live_step(key)) for key in keys]
            routings = engine.routings(engine.live_step(keys[0])).tolist()
    finally:
        engine.close()
    return found, routings


def make_run(backend):
    run = tiny_run(CapturePolicy.NONE, sizes=None, dbo=True)
    changed = {"data_parallel_size": 2, "all2all_backend": backend}
    return run.model_copy(update={"parallel": run.parallel.model_copy(update=changed)})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_traffic_is_moved_by_shape_and_needed_by_the_routing_of_each_rank(backend):
    layers = tiny_model().num_layers
    for rank, (found, routings) in enumerate(run_ranks(2, traffic, make_run(backend))):
        plain, twin = found
        foreign = range(4, 8) if rank == 0 else range(4)
        trips = sum(any(e in foreign for e in ids) for layer in routings for ids in layer)
        assert trips > 0
        assert plain.needed_bytes == twin.needed_bytes == trips * (ROW.row_bytes + ROW.hidden_bytes)
        if backend is All2AllBackend.EXACT:
            assert plain.moved_bytes is None
            continue
        assert plain.moved_bytes == layers * bytes_moved(backend, 8, 2, ROW)
        assert twin.moved_bytes == layers * 2 * bytes_moved(backend, 4, 2, ROW)
        assert plain.moved_bytes >= plain.needed_bytes


def test_one_rank_sends_nothing():
    engine = build_engine(tiny_run())
    try:
        with engine.active():
            key = full_key(8)
            assert exchange_traffic(engine, key, engine.live_step(key)) == Traffic()
    finally:
        engine.close()


def test_last_microbatch_takes_what_is_left_over():
    assert microbatch_tokens(full_key(8)) == [8]
    assert microbatch_tokens(full_key(8, 2)) == [4, 4]
    assert microbatch_tokens(full_key(8, 3)) == [2, 2, 4]
