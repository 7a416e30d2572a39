"""Captures need no blocks of the cache: what a large size takes depends on requests, not tokens."""

import pytest
import torch

from cgprof.config.load import load_run
from cgprof.measure.captures import CapturePoints, capture_keys, memory_totals
from cgprof.measure.memory import MemoryReader
from cgprof.record.types import RankRecord
from cgprof.report.memory import totals_table
from cgprof.shapes import CapturePolicy
from tests.support.builders import build_engine, tiny_model, tiny_run

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MIB = 1 << 20
LEAST_BLOCKS = 1 + 64
CARD_BYTES = 24_000_000_000


def captured(run, model):
    """What all keys of a run took, and the totals; no block of the cache is taken for that."""
    engine = build_engine(run, model)
    try:
        with engine.active():
            free, points = engine.pool.num_free, CapturePoints()
            reader = MemoryReader(engine.device)
            records = list(capture_keys(engine, reader, points, lambda key: None))
            assert engine.pool.num_free == free == engine.pool.num_blocks - 1
            return records, memory_totals(engine, points, records)
    finally:
        engine.release()


def kv_cache_rows(records, totals):
    rows = totals_table(RankRecord(graphs=tuple(records), totals=totals)).records()
    return [row["headline_bytes"] for row in rows if row["what"] == "KV cache"]


def test_size_of_4096_tokens_is_captured_beside_a_cache_of_one_block_a_request():
    limits = {"max_num_seqs": 64, "max_num_batched_tokens": 4096, "max_model_len": 16}
    model = tiny_model(num_experts=0, num_layers=1)
    records, totals = captured(tiny_run(CapturePolicy.FULL, sizes=(4096,), **limits), model)
    (record,) = records
    assert (record.key.num_tokens, record.failure) == (4096, None)
    block_bytes = 2 * 16 * model.num_kv_heads * model.head_dim * 4
    assert kv_cache_rows(records, totals) == [LEAST_BLOCKS * block_bytes]
    assert totals.kv_cache_bytes not in (totals.plain_bytes, totals.outputs_bytes)


@pytest.mark.parametrize("device", DEVICES)
def test_graphs_weigh_the_same_beside_the_least_cache_and_one_of_most_of_the_memory(device):
    size, dtype = (2048, "bfloat16") if device == "cuda" else (64, "float32")
    dims = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 128, "ffn_size": 2 * size}
    model = tiny_model(num_experts=0, hidden_size=256, dtype=dtype, **dims)
    limits = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 64}

    def beside(blocks):
        limited = limits | {"num_gpu_blocks_override": blocks}
        run = tiny_run(CapturePolicy.FULL, sizes=(8, size), device=device, **limited)
        return captured(run, model)

    beside(LEAST_BLOCKS)  # kernels are loaded now
    few, small = beside(LEAST_BLOCKS)
    most_blocks = 20 * LEAST_BLOCKS
    if device == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info()
        most_blocks = int(0.8 * free_bytes) // (small.kv_cache_bytes // LEAST_BLOCKS)
    many, large = beside(most_blocks)
    assert [record.failure for record in (*few, *many)] == [None] * 4
    assert kv_cache_rows(few, small) == [small.kv_cache_bytes]
    assert kv_cache_rows(many, large) == [large.kv_cache_bytes]
    assert large.kv_cache_bytes * LEAST_BLOCKS == small.kv_cache_bytes * most_blocks
    assert large.kv_cache_bytes - small.kv_cache_bytes > 128 * MIB
    pools = [[record.memory.pool_bytes for record in records] for records in (few, many)]
    assert pools[0] == pools[1]
    assert max(pools[0]) > 0
    assert abs(large.plain_bytes - small.plain_bytes) <= 64 * MIB


@pytest.mark.gpu
def test_size_of_4096_tokens_of_a_real_model_is_captured_with_24_gb_of_the_device():
    overrides = {
        "limits.max_num_seqs": 64,
        "limits.max_num_batched_tokens": 4096,
        "capture.sizes": (4096,),
        "capture.policy": "full",
        "measure.device": "cuda",
    }
    run, model = load_run(None, "qwen3-0.6b", overrides)
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info()
    ballast = torch.empty(max(0, free_bytes - CARD_BYTES), dtype=torch.uint8, device="cuda")
    try:
        records, totals = captured(run, model)
    finally:
        del ballast
        torch.cuda.empty_cache()
    assert [(record.key.num_tokens, record.failure) for record in records] == [(4096, None)]
    assert kv_cache_rows(records, totals) == [totals.kv_cache_bytes]
    whole = totals.plain_bytes + totals.kv_cache_bytes + totals.weights_bytes
    assert 0 < totals.plain_bytes < whole < CARD_BYTES
