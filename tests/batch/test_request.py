import numpy as np
import pytest

from cgprof.batch.request import Request, RequestTable
from cgprof.errors import ConfigError


def request(name="a", prompt=(1, 2, 3), max_new_tokens=2, **fields):
    return Request(request_id=name, prompt=prompt, max_new_tokens=max_new_tokens, **fields)


def test_add_fills_every_field_of_the_row():
    table = RequestTable(4, 16)
    asked = request(temperature=0.5, seed=7, stop_token=9)
    row = table.add(asked)
    assert table.token_ids[row, :3].tolist() == [1, 2, 3]
    assert table.num_tokens[row] == table.num_prompt[row] == 3
    assert table.num_computed[row] == 0
    assert table.max_tokens[row] == 5
    assert table.temperature[row] == np.float32(0.5)
    assert table.seed[row] == 7
    assert table.stop_token[row] == 9
    assert table.requests == {row: asked}
    assert table.num_free == 3


def test_reused_row_shows_nothing_of_the_request_before():
    table = RequestTable(1, 16)
    row = table.add(request(prompt=(5,) * 10, temperature=1.0, seed=3, stop_token=2))
    table.num_computed[row] = 10
    table.append(np.array([row], np.int32), np.array([8]))
    assert table.remove(row).prompt == (5,) * 10
    again = table.add(request("b"))
    assert again == row
    assert table.num_tokens[row] == 3
    assert table.num_computed[row] == 0
    assert table.temperature[row] == 0
    assert table.seed[row] == 0
    assert table.stop_token[row] == -1


def test_append_writes_one_token_a_row():
    table = RequestTable(3, 16)
    rows = [table.add(request(str(i), prompt=tuple(range(1, 2 + i)))) for i in range(3)]
    table.append(np.array([rows[2], rows[0]], np.int32), np.array([70, 60]))
    assert table.num_tokens[rows].tolist() == [2, 2, 4]
    assert table.token_ids[rows[0], :2].tolist() == [1, 60]
    assert table.token_ids[rows[1], :2].tolist() == [1, 2]
    assert table.token_ids[rows[2], :4].tolist() == [1, 2, 3, 70]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (request(prompt=()), "prompt is empty"),
        (request(prompt=(1,) * 15), "15 prompt + 2 new tokens exceed max_model_len 16"),
    ],
)
def test_request_that_no_row_could_hold_is_refused(asked, words):
    table = RequestTable(1, 16)
    for refuse in (table.check, table.add):
        with pytest.raises(ConfigError) as error:
            refuse(asked)
        assert words in str(error.value)
    assert table.num_free == 1


def test_full_table_refuses_with_its_size():
    table = RequestTable(1, 16)
    table.add(request())
    with pytest.raises(ConfigError, match="all 1 rows"):
        table.add(request("b"))
