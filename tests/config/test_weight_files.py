import json
import struct

import pytest
import torch

from cgprof.config.weight_files import find_weights, stored_names
from cgprof.errors import ConfigError
from tests.support.checkpoints import save_state

STATE = {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.ones(4), "c": torch.ones(1)}


def refusal(folder) -> str:
    with pytest.raises(ConfigError) as caught:
        find_weights(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_directory_without_weights_has_none(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert find_weights(tmp_path) is None


@pytest.mark.parametrize("num_shards", [1, 2])
def test_headers_say_what_each_file_holds(tmp_path, num_shards):
    save_state(tmp_path, STATE, num_shards=num_shards)
    found = find_weights(tmp_path)
    assert {name: (t.dtype, t.shape) for name, t in found.tensors.items()} == {
        "a": ("BF16", (2, 3)),
        "b": ("F32", (4,)),
        "c": ("F32", (1,)),
    }
    assert len({stored.file for stored in found.tensors.values()}) == num_shards


def test_identity_follows_the_data_and_not_the_place(tmp_path):
    identities = []
    for name, state in (
        ("one", STATE),
        ("same", STATE),
        ("other", STATE | {"b": torch.tensor([1.0, 1.0, 1.0, 2.0])}),
        ("renamed", {"x" if name == "a" else name: t for name, t in STATE.items()}),
    ):
        (tmp_path / name).mkdir()
        save_state(tmp_path / name, state)
        identities.append(find_weights(tmp_path / name).identity)
    assert identities[0] == identities[1]
    assert len(set(identities)) == 3


def test_change_anywhere_in_a_small_file_and_widespread_change_in_a_large_one_show(tmp_path):
    big = torch.zeros(1_000_000)
    save_state(tmp_path, {"big": big})
    before = find_weights(tmp_path).identity
    save_state(tmp_path, {"big": big + 1e-8})
    assert find_weights(tmp_path).identity != before


@pytest.mark.parametrize("size", [0, 5, 40, -4])
def test_file_that_is_cut_off_is_refused(tmp_path, size):
    save_state(tmp_path, STATE)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert "model.safetensors" in refusal(tmp_path)


def test_file_that_is_something_else_is_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    for content in (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n",
        struct.pack("<Q", 4) + b"[[1]",
        struct.pack("<Q", 13) + b'{"a": {"x":1}',
        struct.pack("<Q", 2) + b"\xff\xfe",
    ):
        file.write_bytes(content)
        refusal(tmp_path)


def test_absent_shard_is_named(tmp_path):
    save_state(tmp_path, STATE, num_shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "not there: model-00002-of-00003.safetensors" in refusal(tmp_path)


def test_tensor_that_no_shard_holds_is_named(tmp_path):
    save_state(tmp_path, STATE, num_shards=2)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lost"] = content["weight_map"]["a"]
    index.write_text(json.dumps(content))
    assert "do not hold lost" in refusal(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../x.safetensors"}}'],
)
def test_damaged_index_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert "index.json" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model-00001-of-00002.safetensors"])
def test_other_weights_are_not_passed_over_in_silence(tmp_path, name):
    (tmp_path / name).write_bytes(b"x")
    message = refusal(tmp_path)
    assert name in message
    assert "--load-format dummy" in message


def test_names_are_read_from_files_or_from_the_index_alone(tmp_path):
    assert stored_names(tmp_path) is None
    (tmp_path / "model.bin").write_bytes(b"")
    assert stored_names(tmp_path) is None
    save_state(tmp_path, STATE, num_shards=2)
    for shard in tmp_path.glob("*.safetensors"):
        shard.unlink()
    source, names = stored_names(tmp_path)
    assert (source, set(names)) == ("model.safetensors.index.json", {"a", "b", "c"})
    save_state(tmp_path, {"a": STATE["a"]})
    source, names = stored_names(tmp_path)
    assert (source, set(names)) == ("model.safetensors", {"a"})
