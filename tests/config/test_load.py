from pathlib import Path

import pytest
import torch

from cgprof.config.bundled import bundled_names
from cgprof.config.compat import check
from cgprof.config.load import fingerprint, load_run
from cgprof.config.schema import RunConfig
from cgprof.errors import ConfigError
from cgprof.graphs.plan import make_plan
from cgprof.shapes import CapturePolicy
from tests.support.cards import DENSE, card, write_card
from tests.support.checkpoints import save_state


def write(folder: Path, text: str) -> str:
    path = folder / "run.toml"
    path.write_text(text)
    return str(path)


def refusal(*args, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", bundled_names("runs"))
def test_every_bundled_run_loads(name):
    check(*load_run(name))


def test_no_argument_means_the_tiny_run():
    run, model = load_run()
    assert (model.name, model.dtype) == ("tiny-moe", "float32")
    assert (run.limits.max_num_seqs, run.limits.max_model_len) == (64, 512)
    microbatch = run.microbatch.model_copy(update={"enabled": True})
    plan = make_plan(CapturePolicy.FULL, run.limits, run.capture, microbatch)
    assert (len(plan.plain), len(plan.twins)) == (19, 5)
    assert max(key.num_tokens for key in plan.plain) == 128


def test_model_alone_means_the_defaults():
    run, model = load_run(model="qwen3-8b")
    assert (run.limits, model.name) == (RunConfig().limits, "qwen3-8b")


def test_file_flags_and_set_win_in_that_order(tmp_path):
    path = write(tmp_path, "seed = 1\n[limits]\nmax_num_seqs = 8\nblock_size = 32\n")
    overrides = {"limits.max_num_seqs": 9, "seed": 2}
    run, _ = load_run(path, None, overrides, ["seed=3"])
    assert (run.limits.block_size, run.limits.max_num_seqs, run.seed) == (32, 9, 3)
    assert run.limits.max_num_batched_tokens == RunConfig().limits.max_num_batched_tokens


def test_set_takes_toml_values_and_bare_words():
    run, model = load_run(
        None,
        "tiny-moe",
        {},
        ["capture.sizes=[1, 2]", "capture.policy=full-decode-only", "measure.relative_noise=1"],
    )
    assert run.capture.sizes == (1, 2)
    assert run.capture.policy is CapturePolicy.FULL_DECODE_ONLY
    assert run.measure.relative_noise == 1.0
    assert load_run(None, None, {}, ["model.name=tiny-dense"])[1].name == "tiny-dense"
    assert model.name == "tiny-moe"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[capture]\nsizes = [1, 2, 0]", ["capture.sizes[2]", "--cudagraph-capture-sizes", "0"]),
        ("[limits]\nmax_num_seqs = true", ["limits.max_num_seqs (--max-num-seqs)", "True"]),
        ("[limits]\nmax_num_seqs = '12'", ["limits.max_num_seqs", "'12'"]),
        ("[limits]\nmax_seqs = 12", ["limits.max_seqs", "did you mean limits.max_num_seqs"]),
        ("max_num_seqs = 12", ["max_num_seqs", "did you mean limits.max_num_seqs"]),
        ("[limit]\nmax_num_seqs = 12", ["limit.max_num_seqs", "did you mean limits.max_num_seqs"]),
        ("limits = 3", ["limits", "table"]),
        ("[seed]\nx = 3", ["seed"]),
        ("seed = 2020-01-01", ["seed", "2020-01-01"]),
        ("[measure]\nmax_seconds_per_key = inf", ["measure.max_seconds_per_key", "finite"]),
        ("[capture]\npolicy = 'fast'", ["capture.policy (--mode)", "'fast'", "full-decode-only"]),
        ("[capture", ["not TOML"]),
        ("[model]\nname = 'nowhere'", ["model.name (--model)", "'nowhere'", "tiny-moe"]),
    ],
)
def test_error_in_a_file_names_file_setting_and_flag(tmp_path, text, parts):
    path = write(tmp_path, text)
    message = refusal(path)
    assert message.startswith(path)
    for part in parts:
        assert part in message


def test_error_in_a_flag_or_set_does_not_blame_the_file(tmp_path):
    path = write(tmp_path, "[limits]\nmax_num_seqs = 8\n")
    message = refusal(path, None, {"limits.max_num_seqs": 0})
    assert message.startswith("limits.max_num_seqs (--max-num-seqs): 0")
    message = refusal(path, None, {}, ["limits.max_num_seqs=0"])
    assert message.startswith("--set limits.max_num_seqs")


@pytest.mark.parametrize("text", ["seed", "=3", " =3"])
def test_set_without_a_path_is_refused(text):
    assert "part.field=value" in refusal(None, None, {}, [text])


def test_setting_and_table_of_one_name_are_refused(tmp_path):
    assert "seed" in refusal(write(tmp_path, "seed = 3"), None, {}, ["seed.x=4"])
    assert "table" in refusal(write(tmp_path, "[limits]\nblock_size = 8"), None, {}, ["limits=4"])


def test_unreadable_files_are_named(tmp_path):
    assert "tiny" in refusal(str(tmp_path / "absent.toml"))
    assert "directory" in refusal(str(tmp_path))
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert "bytes.toml" in refusal(str(tmp_path / "bytes.toml"))


def test_default_length_is_clipped_to_the_positions_and_a_stated_one_refused(tmp_path):
    model = write_card(tmp_path, card(DENSE, max_position_embeddings=1024))
    assert load_run(None, model)[0].limits.max_model_len == 1024
    assert load_run(None, model, {"limits.max_model_len": 1024})[0].limits.max_model_len == 1024
    message = refusal(None, model, {"limits.max_model_len": 1025})
    assert message.startswith("limits.max_model_len (--max-model-len): 1025")
    assert "1024" in message


def test_dtype_of_the_run_replaces_that_of_the_card():
    _, model = load_run(None, "tiny-moe", {"model.dtype": "bfloat16"})
    assert model.dtype == "bfloat16"
    assert model.sources["dtype"] == "model.dtype of the run"


def test_load_format_dummy_leaves_weights_alone_and_keeps_them_out_of_the_fingerprint(tmp_path):
    content = card(DENSE, "tie_word_embeddings")
    loaded, seeded, bare = tmp_path / "loaded", tmp_path / "damaged", tmp_path / "bare"
    for folder in (loaded, seeded, bare):
        folder.mkdir()
        write_card(folder, content)
    save_state(loaded, {"lm_head.weight": torch.zeros(2)})
    (seeded / "model.safetensors").write_bytes(b"damaged")
    assert "model.safetensors" in refusal(None, str(seeded))
    dummy = {"model.load_format": "dummy"}
    pairs = [load_run(None, str(bare))]
    pairs += [load_run(None, str(folder), dummy) for folder in (loaded, seeded, bare)]
    assert {model.weights for _, model in pairs} == {None}
    assert len({fingerprint(*pair) for pair in pairs}) == 1
    auto = load_run(None, str(loaded))
    assert auto[1].weights is not None
    assert fingerprint(*auto) != fingerprint(*pairs[0])
    assert "'gguf'" in refusal(None, str(bare), {"model.load_format": "gguf"})


def test_fingerprint_follows_meaning_not_spelling(tmp_path):
    bundled = load_run(None, "tiny-moe")
    same = [
        load_run(None, "TINY-MOE"),
        load_run(None, "tiny-moe", {"model.dtype": "float32"}),
        load_run(write(tmp_path, "[limits]\nblock_size = 16\n"), "tiny-moe"),
    ]
    assert {fingerprint(*pair) for pair in same} == {fingerprint(*bundled)}
    other = [
        load_run(None, "tiny-moe", {"seed": 1}),
        load_run(None, "tiny-moe", {"model.dtype": "bfloat16"}),
        load_run(None, "tiny-dense"),
    ]
    assert len({fingerprint(*pair) for pair in [bundled, *other]}) == 4


def test_fingerprint_is_stable():
    run, model = load_run()
    assert fingerprint(run, model) == fingerprint(
        type(run).model_validate_json(run.model_dump_json()),
        type(model).model_validate_json(model.model_dump_json()),
    )


@pytest.mark.parametrize(
    ("setting", "value"), [("seed", -1), ("seed", 2**63), ("accuracy.contexts", [])]
)
def test_setting_out_of_range_is_refused(setting, value):
    assert setting in refusal(None, "tiny-moe", {setting: value})


@pytest.mark.parametrize("value", ["[" * 2000 + "]" * 2000, "1" * 5000, "0x" + "f" * 5000])
def test_value_too_deep_or_too_large_is_refused(tmp_path, value):
    assert "seed" in refusal(None, "tiny-moe", None, [f"seed={value}"])
    refusal(write(tmp_path, f"seed = {value}"))


def test_tables_too_deep_are_refused(tmp_path):
    refusal(write(tmp_path, ".".join("a" * 3000) + " = 1"))


def test_empty_names_are_told():
    assert refusal("").startswith("--config: is empty")
    assert refusal(None, "").startswith("model.name (--model): is empty")


def test_graph_memory_is_a_size_in_a_file_in_a_flag_and_in_set(tmp_path):
    path = write(tmp_path, "[capture]\nmax_graph_memory_bytes = '0.5GiB'\n")
    assert load_run(path)[0].capture.max_graph_memory_bytes == 2**29
    flag = {"capture.max_graph_memory_bytes": "512MiB"}
    assert load_run(path, None, flag)[0].capture.max_graph_memory_bytes == 2**29
    for text, num_bytes in (("1GB", 10**9), ("1048576", 2**20), ("'2MiB'", 2**21)):
        assignment = f"capture.max_graph_memory_bytes={text}"
        run = load_run(path, None, {}, [assignment])[0]
        assert run.capture.max_graph_memory_bytes == num_bytes
    plain = load_run(path, None, {}, ["capture.max_graph_memory_bytes=536870912"])
    assert fingerprint(*plain) == fingerprint(*load_run(path))
    assert RunConfig.model_validate_json(run.model_dump_json()) == run


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("'lots'", "'lots' is not a size; write whole bytes"),
        ("'-1GiB'", "'-1GiB' is not a size"),
        ("'0GiB'", "0: input should be greater than 0"),
        ("0", "0: input should be greater than 0"),
        ("1.5", "1.5: input should be a valid integer"),
        ("true", "True: input should be a valid integer"),
    ],
)
def test_bad_size_names_file_setting_and_flag(tmp_path, value, problem):
    path = write(tmp_path, f"[capture]\nmax_graph_memory_bytes = {value}\n")
    message = refusal(path)
    assert message.startswith(
        f"{path}: capture.max_graph_memory_bytes (--max-graph-memory): {problem}"
    )
