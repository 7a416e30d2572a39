import dataclasses

import numpy as np
import torch

from cgprof.batch.buffers import InputBuffers
from cgprof.batch.request import Request, RequestTable
from cgprof.engine.inputs import CLEAN, InputWriter, PaddingFill
from cgprof.engine.live import make_step
from cgprof.engine.types import IDLE_STEP
from cgprof.graphs.dispatch import eager_key
from cgprof.kvcache.block_table import BlockTable
from cgprof.kvcache.pool import BlockPool
from cgprof.shapes import GraphKey, RuntimeMode

REQS, TOKENS, LENGTH, BLOCK = 6, 24, 64, 8
POISON = PaddingFill(input_id=3, position=9, block=2)


def decode_key(size):
    return GraphKey(mode=RuntimeMode.FULL, num_tokens=size, num_reqs=size, uniform_query_len=1)


def new_buffers():
    return InputBuffers(
        max_num_tokens=TOKENS,
        max_num_reqs=REQS,
        blocks_per_request=LENGTH // BLOCK,
        num_microbatches=2,
        device=torch.device("cpu"),
    )


def device_rows(buffers, num_reqs, num_tokens):
    """What a step of this padding reads of every field that is not of microbatches."""
    found = {}
    for field in dataclasses.fields(buffers.device_fields):
        if field.name.startswith("split"):
            continue
        of_tokens = field.name in ("input_ids", "positions", "slot_mapping", "is_padding")
        rows = num_tokens if of_tokens else num_reqs
        rows += field.name == "query_start_loc"
        found[field.name] = getattr(buffers.device_fields, field.name)[:rows].tolist()
    return found


def test_what_a_slot_keeps_of_an_earlier_step_is_what_a_new_writer_writes():
    table = RequestTable(REQS, LENGTH)
    blocks = BlockTable(REQS, LENGTH // BLOCK, BLOCK, BlockPool(64))
    rng = np.random.default_rng(0)
    for index in range(REQS):
        temperature = 0.7 if index >= 4 else 0.0
        prompt = tuple(rng.integers(0, 50, 20).tolist())
        request = Request(
            request_id=str(index), prompt=prompt, max_new_tokens=4, temperature=temperature
        )
        table.add(request)
    rows = np.arange(REQS, dtype=np.int32)
    blocks.ensure(rows, np.full(REQS, LENGTH, np.int32))
    table.num_computed[:] = 10
    kept = new_buffers()
    writers = [InputWriter(table, blocks, kept) for _ in range(2)]
    seen = 0
    for turn in range(400):
        real = int(rng.integers(1, REQS + 1))
        # Often the first rows, which are greedy, so that slots meet their own layout again.
        chosen = rows[:real] if rng.random() < 0.7 else rng.permutation(rows)[:real]
        lens = np.ones(real, np.int32)
        key = decode_key(REQS if rng.random() < 0.6 else real)
        if rng.random() < 0.2:
            lens = rng.integers(1, 4, real).astype(np.int32)
            key = eager_key(int(lens.sum()) + 2)
        step = make_step(chosen, lens)
        padding = POISON if rng.random() < 0.3 else CLEAN
        fresh = new_buffers()
        # Two write by turns into the same slots, as the steps without their exchange do.
        got = writers[turn // 3 % 2].write(step, key, padding)
        seen += kept.kept is not None
        want = InputWriter(table, blocks, fresh).write(step, key, padding)
        assert (got.num_reqs, got.any_random) == (want.num_reqs, want.any_random)
        sizes = got.num_reqs, key.num_tokens
        assert device_rows(kept, *sizes) == device_rows(fresh, *sizes), turn
        table.num_computed[chosen] = rng.integers(0, 15, real)
    assert seen > 50


def test_a_slot_that_another_writer_used_is_written_anew():
    table = RequestTable(REQS, LENGTH)
    blocks = BlockTable(REQS, LENGTH // BLOCK, BLOCK, BlockPool(64))
    for index in range(4):
        table.add(Request(request_id=str(index), prompt=(1, 2, 3), max_new_tokens=1))
    rows = np.arange(4, dtype=np.int32)
    blocks.ensure(rows, np.full(4, 3, np.int32))
    step, key = make_step(rows, np.ones(4, np.int32)), decode_key(4)
    buffers = new_buffers()
    first, second = (InputWriter(table, blocks, buffers) for _ in range(2))
    first.write(step, key, CLEAN)
    for _ in range(4):  # all slots
        second.write(IDLE_STEP, key, CLEAN)
    for _ in range(4):
        first.write(step, key, CLEAN)
        assert buffers.device_fields.query_start_loc[:5].tolist() == [0, 1, 2, 3, 4]
        assert not buffers.device_fields.is_padding[:4].any()
