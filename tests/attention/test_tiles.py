import pytest

from cgprof.attention.tiles import MAX_SPLITS, Tile, choose_splits, choose_tile


def _tile(single_token: bool, group: int = 8) -> Tile:
    return choose_tile(group=group, head_dim=128, dtype_bytes=2, single_token=single_token)


def _splits(tile: Tile, num_tokens: int, num_reqs: int, max_seq_len: int = 4096) -> int:
    return choose_splits(
        tile,
        num_tokens=num_tokens,
        num_reqs=num_reqs,
        num_kv_heads=4,
        max_seq_len=max_seq_len,
    )


@pytest.mark.parametrize("group", [1, 3, 8, 20, 64, 128])
@pytest.mark.parametrize("single_token", [True, False])
def test_tile_holds_a_whole_group_and_what_a_tensor_core_takes(group, single_token):
    tile = _tile(single_token, group)
    assert tile.group_padded >= group
    assert tile.rows >= 16
    assert tile.rows == tile.tokens * tile.group_padded
    assert tile.tokens >= 1
    assert tile.tokens == 1 or not single_token


@pytest.mark.parametrize("query_lens", [[1], [8], [9, 1, 8, 7], [0, 64, 0], [1] * 33])
def test_tiles_cover_every_request_and_the_padding(query_lens):
    tile = _tile(single_token=False)
    used, first = 0, 0
    for request, length in enumerate([*query_lens, 21]):
        first_tile = first // tile.tokens + request
        assert first_tile >= used
        used = first_tile + -(-length // tile.tokens)
        first += length
    assert used <= tile.count(first, len(query_lens))


def test_splits_fill_the_device_with_few_requests_and_none_with_many():
    single = _tile(single_token=True)
    assert [_splits(single, n, n) for n in (1, 8, 16, 32, 64, 256)] == [16, 8, 4, 2, 1, 1]
    assert _splits(_tile(single_token=False), 512, 1) == 1
    assert _splits(_tile(single_token=False), 8, 8) == 8


def test_splits_of_short_contexts_are_one():
    assert _splits(_tile(single_token=True), 1, 1, max_seq_len=511) == 1
    assert _splits(_tile(single_token=True), 1, 1, max_seq_len=1024) == 4
    assert _splits(_tile(single_token=True), 1, 1, max_seq_len=1 << 20) == MAX_SPLITS
