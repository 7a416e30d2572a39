import pytest
import torch

from cgprof.errors import ConfigError
from cgprof.models.gguf_llama import GgufLlama
from cgprof.models.tokenizer import Tokenizer
from tests.support.cards import card
from tests.support.checkpoints import LLAMA, save_model
from tests.support.gguf_files import write_gguf

pytest.importorskip("gguf")


@pytest.fixture
def state(tmp_path):
    return save_model(tmp_path, LLAMA)


def test_card_says_what_the_file_says(tmp_path, state):
    write_gguf(tmp_path / "x.gguf", state, LLAMA)
    read = GgufLlama(tmp_path / "x.gguf")
    found = read.card()
    assert {key: found[key] for key in LLAMA if key != "dtype"} == {
        key: value for key, value in LLAMA.items() if key != "dtype"
    }
    assert (found["rms_norm_eps"], found["dtype"]) == (1e-6, "bfloat16")
    assert (read.name, read.license) == ("tiny", "mit")


def test_tensors_come_back_under_their_published_names_and_row_order(tmp_path, state):
    write_gguf(tmp_path / "x.gguf", state, LLAMA)
    found = dict(GgufLlama(tmp_path / "x.gguf").weights())
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name].bfloat16()) for name in state)


def test_quantised_tensors_are_dequantised(tmp_path, state):
    names = ("model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.weight")
    write_gguf(tmp_path / "x.gguf", state, LLAMA, quantised=names)
    found = dict(GgufLlama(tmp_path / "x.gguf").weights())
    for name in names:
        assert not torch.equal(found[name], state[name].bfloat16())
        torch.testing.assert_close(found[name].float(), state[name], rtol=0.02, atol=5e-3)


def test_file_without_a_head_is_tied(tmp_path, state):
    del state["lm_head.weight"]
    write_gguf(tmp_path / "x.gguf", state, LLAMA)
    read = GgufLlama(tmp_path / "x.gguf")
    assert read.card()["tie_word_embeddings"] is True
    assert dict(read.weights()).keys() == state.keys()


def test_tokenizer_splits_digits_and_keeps_control_tokens_whole(tmp_path, state):
    write_gguf(tmp_path / "x.gguf", state, LLAMA)
    GgufLlama(tmp_path / "x.gguf").tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_id == 0
    assert tokenizer.encode("<end>") == [0]
    assert len(tokenizer.encode("th")) == 1
    for text in ("the  cat 1999\n", "\u00e9\u6f22 +"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_what_is_not_converted_is_refused(tmp_path, state):
    def refusal(**settings) -> str:
        write_gguf(tmp_path / "x.gguf", state, LLAMA, **settings)
        with pytest.raises(ConfigError) as caught:
            GgufLlama(tmp_path / "x.gguf").tokenizer()
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "'qwen2'" in refusal(architecture="qwen2")
    assert "'qwen2'" in refusal(pre="qwen2")
    assert "blk.0.attn_q.bias" in refusal(extra=("blk.0.attn_q.bias",))
    assert "rope_freqs.weight" in refusal(extra=("rope_freqs.weight",))


@pytest.mark.parametrize("size", [0, 3, 100, 20_000, -40])
def test_file_that_is_cut_off_is_refused(tmp_path, state, size):
    file = tmp_path / "x.gguf"
    write_gguf(file, state, LLAMA)
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ConfigError, match=r"x\.gguf"):
        GgufLlama(file)


def test_absent_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        GgufLlama(tmp_path / "absent.gguf")


def test_heads_need_not_be_square(tmp_path):
    content = card(LLAMA, hidden_size=48, num_attention_heads=6, num_key_value_heads=2, head_dim=8)
    state = save_model(tmp_path, content)
    write_gguf(tmp_path / "x.gguf", state, content)
    found = dict(GgufLlama(tmp_path / "x.gguf").weights())
    assert all(torch.equal(found[name], state[name].bfloat16()) for name in state)
