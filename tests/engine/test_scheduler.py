import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgprof.batch.request import Request, RequestTable
from cgprof.config.schema import Limits
from cgprof.engine.scheduler import Scheduler
from cgprof.errors import ConfigError
from cgprof.kvcache.block_table import BlockTable
from cgprof.kvcache.pool import BlockPool

VOCAB = 97


def make_scheduler(*, reqs=4, tokens=16, length=64, block=4, blocks=65):
    table = RequestTable(reqs, length)
    block_table = BlockTable(reqs, -(-length // block), block, BlockPool(blocks))
    limits = Limits(
        max_num_seqs=reqs, max_num_batched_tokens=tokens, max_model_len=length, block_size=block
    )
    return Scheduler(table, block_table, limits), table, block_table


def ask(name, prompt_len, new=4, **fields):
    prompt = tuple(range(1, prompt_len + 1))
    return Request(request_id=str(name), prompt=prompt, max_new_tokens=new, **fields)


def next_tokens(table, step):
    """A stand-in model: each token follows from the last one and its position alone."""
    last = table.num_computed[step.rows] + step.query_lens - 1
    ids = table.token_ids[step.rows, last].astype(np.int64)
    return (ids * 31 + last * 7 + 5) % VOCAB


def alone(request):
    tokens = list(request.prompt)
    for _ in range(request.max_new_tokens):
        tokens.append((tokens[-1] * 31 + (len(tokens) - 1) * 7 + 5) % VOCAB)
        if tokens[-1] == request.stop_token:
            break
    return tuple(tokens[len(request.prompt) :])


def run(scheduler, table, *, limit=10_000, check=lambda step: None):
    outputs = {}
    for _ in range(limit):
        step = scheduler.schedule()
        if step is None:
            return outputs
        check(step)
        for done in scheduler.advance(step, next_tokens(table, step)):
            assert done.request.request_id not in outputs
            outputs[done.request.request_id] = done.output
    raise AssertionError(f"not done after {limit} steps")


def test_prompt_runs_in_chunks_then_decodes_alone():
    scheduler, table, _ = make_scheduler(tokens=4)
    scheduler.submit(ask("a", 10, new=3))
    seen = []
    outputs = run(
        scheduler,
        table,
        check=lambda step: seen.append((step.query_lens.tolist(), step.shape.num_prefills)),
    )
    assert seen == [([4], 1), ([4], 1), ([2], 1), ([1], 0), ([1], 0)]
    assert outputs == {"a": alone(ask("a", 10, new=3))}


def test_decodes_come_first_and_share_the_step_with_a_prompt_chunk():
    scheduler, table, _ = make_scheduler(tokens=8)
    scheduler.submit(ask("a", 3))
    scheduler.submit(ask("b", 4))
    first = scheduler.schedule()
    assert first.query_lens.tolist() == [3, 4]
    scheduler.submit(ask("long", 20))
    scheduler.advance(first, next_tokens(table, first))
    step = scheduler.schedule()
    assert step.query_lens.tolist() == [1, 1, 6]
    assert step.shape.num_prefills == 1
    assert step.shape.num_tokens == 8
    assert step.shape.max_query_len == 6
    assert [table.requests[int(row)].request_id for row in step.rows] == ["a", "b", "long"]


def test_running_chunks_come_before_waiting_requests():
    scheduler, table, _ = make_scheduler(tokens=4)
    scheduler.submit(ask("a", 7))
    first = scheduler.schedule()
    scheduler.submit(ask("b", 2))
    scheduler.advance(first, next_tokens(table, first))
    step = scheduler.schedule()
    assert [table.requests[int(row)].request_id for row in step.rows] == ["a", "b"]
    assert step.query_lens.tolist() == [3, 1]


@pytest.mark.parametrize("prompt_len", [5, 9])
def test_one_token_chunk_of_a_prompt_is_not_a_decode(prompt_len):
    scheduler, table, _ = make_scheduler(tokens=4)
    scheduler.submit(ask("a", prompt_len))
    shapes = []
    run(scheduler, table, check=lambda step: shapes.append(step.shape))
    tail = shapes[prompt_len // 4]
    assert tail.num_tokens == tail.num_reqs == 1
    assert tail.num_prefills == 1
    assert tail.uniform_query_len is None
    assert shapes[prompt_len // 4 + 1].uniform_query_len == 1


def test_one_token_prompt_is_not_a_decode():
    scheduler, table, _ = make_scheduler()
    scheduler.submit(ask("a", 1, new=2))
    shapes = []
    run(scheduler, table, check=lambda step: shapes.append(step.shape.uniform_query_len))
    assert shapes == [None, 1]


def test_stop_token_ends_a_request_and_frees_row_and_blocks():
    scheduler, table, block_table = make_scheduler()
    free = block_table.pool.num_free
    whole = alone(ask("a", 5, new=20))
    stop = whole[6]
    assert stop not in whole[:6]
    scheduler.submit(ask("a", 5, new=20, stop_token=stop))
    assert run(scheduler, table) == {"a": whole[:7]}
    assert block_table.pool.num_free == free
    assert table.num_free == 4
    assert not scheduler.has_work


def test_token_minus_one_never_stops_a_request_without_stop_token():
    scheduler, _, _ = make_scheduler()
    scheduler.submit(ask("a", 2, new=3))
    step = scheduler.schedule()
    assert scheduler.advance(step, np.array([0])) == []
    step = scheduler.schedule()
    assert scheduler.advance(step, np.array([0])) == []


def test_unfinished_prompt_drops_its_sampled_token():
    scheduler, table, _ = make_scheduler(tokens=4)
    scheduler.submit(ask("a", 6))
    step = scheduler.schedule()
    scheduler.advance(step, np.array([55]))
    row = int(step.rows[0])
    assert table.num_tokens[row] == 6
    assert 55 not in table.token_ids[row]


def test_more_requests_than_rows_wait_their_turn():
    scheduler, table, _ = make_scheduler(reqs=2, tokens=8)
    requests = [ask(i, 1 + i % 5, new=1 + i % 4) for i in range(9)]
    for request in requests:
        scheduler.submit(request)
    outputs = run(scheduler, table, check=lambda step: len(step.rows) <= 2 or pytest.fail("rows"))
    assert outputs == {r.request_id: alone(r) for r in requests}


def test_blocks_run_out_and_the_youngest_computes_again():
    scheduler, table, block_table = make_scheduler(blocks=7)
    requests = [ask("old", 8, new=12), ask("young", 8, new=12)]
    for request in requests:
        scheduler.submit(request)
    order = []
    outputs = run(
        scheduler,
        table,
        check=lambda step: order.append(table.requests[int(step.rows[0])].request_id),
    )
    assert scheduler.num_preemptions > 0
    assert outputs == {r.request_id: alone(r) for r in requests}
    assert list(outputs) == ["old", "young"]
    assert "young" not in order[: order.index("young")]
    assert block_table.pool.num_free == 6


def test_recomputed_tokens_count_as_a_prompt():
    scheduler, table, _ = make_scheduler(blocks=7, tokens=32)
    for name in ("old", "young"):
        scheduler.submit(ask(name, 8, new=12))
    seen = []

    def check(step):
        names = [table.requests[int(row)].request_id for row in step.rows]
        seen.append((names, step.query_lens.tolist(), step.shape.num_prefills))

    run(scheduler, table, check=check)
    again = [lens for names, lens, prefills in seen[1:] if prefills and names[-1] == "young"]
    assert again
    assert all(lens[-1] > 8 for lens in again)


def test_request_that_could_never_fit_is_refused_with_numbers():
    scheduler, _, _ = make_scheduler(blocks=5)
    with pytest.raises(ConfigError, match=r"request big: needs 5 KV blocks of 4 tokens.*has 4"):
        scheduler.submit(ask("big", 10, new=8))
    scheduler.submit(ask("fits", 10, new=7))
    with pytest.raises(ConfigError, match="max_model_len 64"):
        scheduler.submit(ask("long", 60, new=5))
    with pytest.raises(ConfigError, match="max_new_tokens is 0"):
        scheduler.submit(ask("none", 6, new=0))


def test_request_of_exactly_the_whole_cache_runs():
    scheduler, table, block_table = make_scheduler(blocks=5)
    request = ask("fits", 10, new=7)
    scheduler.submit(request)
    assert run(scheduler, table) == {"fits": alone(request)}
    assert block_table.pool.num_free == 4


def test_blocks_held_by_someone_else_are_an_error_not_an_idle_loop():
    scheduler, _, block_table = make_scheduler(blocks=5)
    block_table.pool.allocate(4)
    scheduler.submit(ask("a", 3, new=2))
    with pytest.raises(ConfigError, match=r"1 requests wait and none runs.* 0 of 4 KV blocks"):
        scheduler.schedule()


def test_nothing_to_do_returns_none():
    scheduler, _, _ = make_scheduler()
    assert scheduler.schedule() is None
    assert not scheduler.has_work


def test_rows_of_a_step_own_blocks_for_every_token_they_run():
    scheduler, table, block_table = make_scheduler(blocks=9, tokens=6)

    def check(step):
        after = table.num_computed[step.rows] + step.query_lens
        assert (block_table.num_blocks[step.rows] * 4 >= after).all()

    for i in range(8):
        scheduler.submit(ask(i, 1 + 3 * i % 11, new=6))
    run(scheduler, table, check=check)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=12),
    reqs=st.integers(1, 5),
    tokens=st.integers(1, 24),
    blocks=st.integers(9, 24),
    arrivals=st.integers(0, 5),
)
def test_any_load_ends_with_the_tokens_of_each_request_alone(sizes, reqs, tokens, blocks, arrivals):
    scheduler, table, block_table = make_scheduler(reqs=reqs, tokens=tokens, blocks=blocks)
    requests = [ask(i, prompt, new) for i, (prompt, new) in enumerate(sizes)]
    queue = iter(requests)
    for request in itertools.islice(queue, max(1, len(requests) - arrivals)):
        scheduler.submit(request)

    def check(step):
        assert 0 < step.shape.num_tokens == step.query_lens.sum() <= tokens
        assert step.shape.num_reqs == len(step.rows) == len(set(step.rows.tolist()))
        assert step.shape.max_query_len == step.query_lens.max()
        prefills = step.shape.num_prefills
        assert (step.query_lens[: len(step.rows) - prefills] == 1).all()
        late = next(queue, None)
        if late is not None:
            scheduler.submit(late)

    assert run(scheduler, table, check=check) == {r.request_id: alone(r) for r in requests}
    assert block_table.pool.num_free == blocks - 1
    assert table.num_free == reqs


def test_seed_and_temperature_stay_with_a_paused_request():
    scheduler, table, _ = make_scheduler(blocks=7)
    scheduler.submit(ask("old", 8, new=12))
    scheduler.submit(dataclasses.replace(ask("young", 8, new=12), temperature=0.5, seed=9))
    while not scheduler.num_preemptions:
        step = scheduler.schedule()
        scheduler.advance(step, next_tokens(table, step))
    row = next(row for row, request in table.requests.items() if request.request_id == "young")
    assert table.temperature[row] == 0.5
    assert table.seed[row] == 9
    assert table.num_tokens[row] > 8
