import json

import pytest

from cgprof.errors import ConfigError
from cgprof.models.tokenizer import Tokenizer
from tests.support.checkpoints import save_tokenizer


def test_text_survives_the_way_there_and_back(tmp_path):
    save_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    for text in ("the  end\n", "12 + 30", "\u00e9\u6f22", "a<end>b"):
        ids = tokenizer.encode(text)
        assert ids[0] == 0
        assert tokenizer.decode(ids) == text.replace("<end>", "")
        assert tokenizer.encode(text, special_tokens=False) == ids[1:]
        assert max(ids) < tokenizer.vocab_size == 258
    assert len(tokenizer.encode("th")) == 2


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"config.json": {"eos_token_id": 7}}, 7),
        ({"config.json": {"eos_token_id": [9, 7]}}, 9),
        ({"config.json": {"eos_token_id": 7}, "generation_config.json": {"eos_token_id": 0}}, 0),
        ({"config.json": {}, "tokenizer_config.json": {"eos_token": "<end>"}}, 0),
        ({"tokenizer_config.json": {"eos_token": {"content": "<end>"}}}, 0),
        ({"tokenizer_config.json": {"eos_token": "<absent>"}}, None),
    ],
)
def test_end_token_is_found_beside_it(tmp_path, files, expected):
    save_tokenizer(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert Tokenizer.load(str(tmp_path)).eos_id == expected


@pytest.mark.parametrize("content", [None, b"", b'{"model": {"voc', b"[]", b"{}", b"\xff\xfe"])
def test_absent_or_damaged_tokenizer_is_one_line(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
