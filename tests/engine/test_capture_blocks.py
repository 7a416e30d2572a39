"""Captures need no blocks of the cache: what a large size takes depends on requests, not tokens."""

from cgprof.measure.captures import CapturePoints, capture_keys, memory_totals
from cgprof.measure.memory import MemoryReader
from cgprof.record.types import RankRecord
from cgprof.report.memory import totals_table
from cgprof.shapes import CapturePolicy
from tests.support.builders import build_engine, tiny_model, tiny_run


def test_size_of_4096_tokens_is_captured_beside_a_cache_of_one_block_a_request():
    limits = {"max_num_seqs": 64, "max_num_batched_tokens": 4096, "max_model_len": 16}
    model = tiny_model(num_experts=0, num_layers=1)
    engine = build_engine(tiny_run(CapturePolicy.FULL, sizes=(4096,), **limits), model)
    try:
        with engine.active():
            assert engine.pool.num_blocks == 1 + 64
            free, points = engine.pool.num_free, CapturePoints()
            reader = MemoryReader(engine.device)
            records = list(capture_keys(engine, reader, points, lambda key: None))
            assert engine.pool.num_free == free
            totals = memory_totals(engine, points, records)
            block_bytes = engine.kv_cache[:, 0].nbytes
    finally:
        engine.close()
    (record,) = records
    assert (record.key.num_tokens, record.failure) == (4096, None)
    assert totals.kv_cache_bytes == 65 * block_bytes
    rows = totals_table(RankRecord(graphs=(record,), totals=totals)).records()
    assert [row for row in rows if "KV cache" in row.values()] != []
    assert totals.kv_cache_bytes not in (totals.plain_bytes, totals.outputs_bytes)
