import csv
import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from cgprof.cli.app import app
from tests.support.cards import DENSE, MOE, card, write_card


def run(*args: str):
    return CliRunner().invoke(app, list(args))


def shown(*args: str) -> str:
    result = run("inspect", *args)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def refused(*args: str) -> str:
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    return result.stderr


def document(*args: str) -> dict:
    def never(name: str) -> object:
        raise AssertionError(name)

    return json.loads(shown(*args, "--format", "json"), parse_constant=never)


def test_text_shows_fields_with_sources_weights_and_kv(tmp_path):
    text = shown(write_card(tmp_path, MOE))
    assert "family: qwen3_moe\n" in text
    assert "feed-forward: MoE, 8 experts\n" in text
    assert "attention: GQA\n" in text
    assert "KV bytes a token: 512 (512 B) in float32\n" in text
    assert "\nnum_heads          4          num_attention_heads\n" in text
    assert "\nhead_dim           16         head_dim\n" in text
    assert "\ntotal         " in text


def test_unknown_family_is_sized_while_every_other_command_refuses_it(tmp_path):
    content = {
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "torch_dtype": "bfloat16",
        "model_type": "deepseek_v2",
    }
    path = write_card(tmp_path, content)
    text = shown(path)
    assert "family: unknown, cannot be run\n" in text
    assert "attention: MLA\n" in text
    assert "KV bytes a token: 31104 " in text
    assert "weight bytes: unknown" in text
    for command in ("plan", "capture", "check", "generate"):
        extra = ["--prompt", "x"] if command == "generate" else []
        assert "'deepseek_v2' is not supported" in refused(command, "--model", path, *extra)


def test_assumed_dtype_is_visible(tmp_path):
    assert "assumed: bfloat16" in shown(write_card(tmp_path, card(DENSE, "dtype")))
    assert "'bf17'" in refused("inspect", write_card(tmp_path, card(DENSE, dtype="bf17")))


def test_tokens_multiply_the_kv_bytes(tmp_path):
    path = write_card(tmp_path, {"n_layer": 24, "n_embd": 2048, "n_head": 16, "multi_query": True})
    assert "KV bytes of 8192 tokens: 100663296 (96 MiB)\n" in shown(path, "--tokens", "8192")
    assert document(path, "--tokens", "8192")["kv_bytes"] == 100_663_296


def test_json_holds_everything(tmp_path):
    found = document(write_card(tmp_path, card(MOE, model_type="new_moe")), "--dtype", "bfloat16")
    assert (found["family"], found["can_be_run"]) == ("unknown", False)
    assert found["fields"]["num_heads"] == {"value": 4, "source": "num_attention_heads"}
    assert found["fields"]["dtype"] == {"value": "bfloat16", "source": "--dtype"}
    assert found["weight_bytes"] == sum(part["total_bytes"] for part in found["weights"])
    assert found["weight_bytes"] == 2 * found["num_parameters"]
    assert found["quantisation"] is None


def test_each_table_is_printed_alone():
    fields = list(csv.DictReader(shown("qwen3-0.6b", "--format", "csv").splitlines()))
    assert {"field": "num_layers", "value": "28", "source": "num_hidden_layers"} in fields
    args = ("qwen3-0.6b", "--format", "csv", "--table", "weights")
    parts = list(csv.DictReader(shown(*args).splitlines()))
    assert parts[-1]["part"] == "total"
    assert parts[-1]["total_bytes"] == "1192099840"
    assert "| num\\_layers | 28 |" in shown("qwen3-0.6b", "--format", "md").replace("_", "\\_")


def test_quantised_card_shows_method_and_both_kinds_of_bytes(tmp_path):
    block = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}
    text = shown(write_card(tmp_path, card(MOE, quantization_config=block)))
    assert "family: qwen3_moe, cannot be run\n" in text
    assert "quantisation: fp8 (quantization_config), 1 entries" in text
    assert "in fp8 and float32" in text


@pytest.mark.parametrize("command", [["inspect"], ["plan", "--model"]], ids=["inspect", "plan"])
def test_what_is_no_card_gets_six_short_different_lines(tmp_path, command):
    good = json.dumps(DENSE)
    contents = {
        "comma.json": good[:-1] + ",}",
        "empty.json": "",
        "tokenizer_config.json": json.dumps({"tokenizer_class": "Qwen2Tokenizer"}),
        "list.json": f"[{good}]",
    }
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "folder").mkdir()
    places = [str(tmp_path / name) for name in (*contents, "folder")]
    places.append("Qwen/Qwen3-Nowhere")
    lines = [refused(*command, place) for place in places]
    for place, line in zip(places, lines, strict=True):
        assert place in line
        assert len(line.replace(place, "")) < 250
    assert len({line.replace(place, "") for place, line in zip(places, lines, strict=True)}) == 6


@pytest.mark.parametrize("command", ["plan", "capture"])
def test_overlap_without_experts_is_refused_before_torch_is_loaded(tmp_path, command):
    path = write_card(tmp_path, card(DENSE, model_type="llama"))
    code = (
        "import sys; from cgprof.cli.app import app\n"
        "try: app(sys.argv[1:], standalone_mode=False)\n"
        "finally: print('torch' in sys.modules)"
    )
    args = [sys.executable, "-c", code, command, "--model", path, "--dbo"]
    done = subprocess.run(args, text=True, capture_output=True, check=False)
    assert "no experts in this config" in done.stderr
    assert done.stdout == "False\n"
    assert refused(command, "--model", path, "--dbo").startswith("error: ")


def test_inspect_loads_no_torch():
    code = (
        "import sys; from cgprof.cli.app import app\n"
        "try: app(['inspect', 'tiny-moe'], standalone_mode=False)\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)"
    )
    args = [sys.executable, "-c", code]
    assert subprocess.run(args, text=True, capture_output=True, check=True).stderr == "False\n"
