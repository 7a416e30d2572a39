import json

import pytest
import torch

from cgprof.config.bundled import bundled_names
from cgprof.config.load import fingerprint
from cgprof.config.model_card import load_model_card
from cgprof.config.schema import ModelConfig, RunConfig
from cgprof.errors import ConfigError
from tests.support.cards import DENSE, MOE, card, write_card
from tests.support.checkpoints import save_state


def load(folder, content: dict[str, object]) -> ModelConfig:
    return load_model_card(write_card(folder, content))


def refusal(folder, content: dict[str, object]) -> str:
    path = write_card(folder, content)
    with pytest.raises(ConfigError) as caught:
        load_model_card(path)
    assert caught.value.where == path
    assert "\n" not in str(caught.value)
    return caught.value.problem


def test_published_dimensions_are_read():
    model = load_model_card("qwen3-30b-a3b")
    assert (model.num_layers, model.hidden_size, model.vocab_size) == (48, 2048, 151936)
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == (32, 4, 128)
    assert (model.num_experts, model.experts_per_token, model.expert_ffn_size) == (128, 8, 768)
    assert model.norm_topk
    assert not model.tied_embeddings
    assert (model.rope.theta, model.max_positions, model.dtype) == (1e6, 40960, "bfloat16")


@pytest.mark.parametrize("name", bundled_names("models"))
def test_every_bundled_card_loads_whatever_its_case(name):
    model = load_model_card(name.upper())
    assert model.name == name
    assert not any(source.startswith("assumed") for source in model.sources.values())


@pytest.mark.parametrize("base", [DENSE, MOE])
def test_every_field_has_a_source(tmp_path, base):
    fields = ModelConfig.model_fields.keys() - {"name", "directory", "sources"}
    assert load(tmp_path, base).sources.keys() == fields


def test_llama_is_dense_without_norms_of_heads(tmp_path):
    content = card(DENSE, "model_type", architectures=["LlamaForCausalLM"], mlp_bias=False)
    model = load(tmp_path, content)
    assert (model.family, model.qk_norm, model.is_moe) == ("llama", False, False)
    for biases in ({"mlp_bias": True}, {"attention_bias": True}, {"num_experts": 4}):
        refusal(tmp_path, card(content, **biases))


def test_llama_with_experts_weighs_them_by_score_or_all_alike(tmp_path):
    model = load(tmp_path, card(MOE, model_type="llama_moe"))
    assert (model.family, model.qk_norm, model.num_experts) == ("llama_moe", False, 8)
    assert not model.uniform_routing
    for value in (True, False):
        content = card(MOE, model_type="llama_moe", cgprof_uniform_routing=value)
        assert load(tmp_path, content).uniform_routing is value
    refusal(tmp_path, card(MOE, cgprof_uniform_routing="yes"))


MIXTRAL = card(
    DENSE,
    *("head_dim", "rope_theta", "rms_norm_eps"),
    model_type="mixtral",
    num_local_experts=8,
    num_experts_per_tok=2,
    intermediate_size=96,
    sliding_window=None,
)


def test_mixtral_has_experts_of_the_one_width_and_weights_that_sum_to_one(tmp_path):
    model = load(tmp_path, MIXTRAL)
    assert (model.family, model.qk_norm, model.norm_topk) == ("mixtral", False, True)
    assert (model.num_experts, model.experts_per_token, model.expert_ffn_size) == (8, 2, 96)
    assert (model.ffn_size, model.head_dim) == (0, 16)
    assert model.sources["num_experts"] == "num_local_experts"
    assert model.sources["expert_ffn_size"] == "intermediate_size"
    assert model.sources["norm_topk"] == "family mixtral"
    assert "norm_topk_prob is False" in refusal(tmp_path, card(MIXTRAL, norm_topk_prob=False))
    for key in ("num_local_experts", "num_experts_per_tok", "intermediate_size"):
        assert key in refusal(tmp_path, card(MIXTRAL, key))


def test_what_a_card_leaves_unsaid_is_its_familys_and_said_so(tmp_path):
    model = load(tmp_path, MIXTRAL)
    assert (model.rope.theta, model.norm_eps) == (1e6, 1e-5)
    other = load(tmp_path, card(DENSE, "rope_theta", "rms_norm_eps", "tie_word_embeddings"))
    assert (other.rope.theta, other.norm_eps, other.tied_embeddings) == (1e4, 1e-6, False)
    for field in ("rope", "norm_eps"):
        assert model.sources[field].startswith("family default")
    assert other.sources["tied_embeddings"].startswith("family default")


def test_window_of_mixtral_is_in_use_unless_null(tmp_path):
    problem = refusal(tmp_path, card(MIXTRAL, sliding_window=4096))
    assert "4096" in problem
    assert "null" in problem
    load(tmp_path, card(MIXTRAL, "sliding_window"))
    load(tmp_path, card(DENSE, sliding_window=4096))


def test_text_settings_of_a_known_family_are_found_one_level_down(tmp_path):
    vision = {"model_type": "siglip", "hidden_size": 1152, "num_attention_heads": 16}
    content = {"text_config": DENSE, "vision_config": vision}
    model = load(tmp_path, content)
    assert (model.family, model.hidden_size, model.num_heads) == ("qwen3", 64, 4)
    assert model.sources["num_heads"] == "text_config.num_attention_heads"
    assert model.sources["rope"] == "text_config.rope_theta"
    assert "'llava'" in refusal(tmp_path, {**content, "model_type": "llava"})


def test_directory_of_a_card_is_known(tmp_path):
    assert load(tmp_path, DENSE).directory == str(tmp_path)
    assert load_model_card(write_card(tmp_path, DENSE, "other.json")).directory is None
    assert load_model_card("qwen3-8b").directory is None


@pytest.mark.parametrize(
    ("changes", "drop", "tied"),
    [({"tie_word_embeddings": True}, [], True), ({}, ["tie_word_embeddings"], True)],
)
def test_weights_without_a_head_tie_a_card_that_does_not_say(tmp_path, changes, drop, tied):
    save_state(tmp_path, {"model.embed_tokens.weight": torch.zeros(2)})
    model = load(tmp_path, card(DENSE, *drop, **changes))
    assert model.tied_embeddings is tied
    if drop:
        assert "has no lm_head.weight" in model.sources["tied_embeddings"]
    assert model.weights.startswith("sha256:")


def test_weights_with_a_head_leave_a_card_that_does_not_say_untied(tmp_path):
    save_state(tmp_path, {"lm_head.weight": torch.zeros(2)})
    model = load(tmp_path, card(DENSE, "tie_word_embeddings"))
    assert not model.tied_embeddings
    assert "holds lm_head.weight" in model.sources["tied_embeddings"]


def test_untied_card_beside_weights_without_a_head_is_refused(tmp_path):
    save_state(tmp_path, {"model.embed_tokens.weight": torch.zeros(2)})
    assert "no output head" in refusal(tmp_path, DENSE)


def test_card_is_found_as_file_and_as_directory(tmp_path):
    folder = tmp_path / "My-Model"
    folder.mkdir()
    path = write_card(folder, DENSE)
    assert load_model_card(str(folder)) == load_model_card(path)
    assert load_model_card(path).name == "My-Model"
    assert load_model_card(write_card(folder, DENSE, "other.json")).name == "other"


def test_declared_head_dim_wins_over_the_derived_one(tmp_path):
    shape = {"hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8}
    model = load(tmp_path, card(DENSE, head_dim=64, num_hidden_layers=24, **shape))
    kv_bytes_per_token = 2 * model.num_kv_heads * model.head_dim * model.num_layers * 2
    assert kv_bytes_per_token == 49_152
    assert model.sources["head_dim"] == "head_dim"


def test_absent_head_dim_is_derived_and_said_so(tmp_path):
    model = load(tmp_path, card(DENSE, "head_dim"))
    assert model.head_dim == 16
    assert model.sources["head_dim"].startswith("derived")
    assert "does not divide" in refusal(tmp_path, card(DENSE, "head_dim", hidden_size=66))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({"num_key_value_heads": None}, 4), ({}, 4), ({"multi_query": True}, 1)],
)
def test_absent_or_null_kv_heads_are_query_heads(tmp_path, changes, expected):
    model = load(tmp_path, card(DENSE, "num_key_value_heads", **changes))
    assert model.num_kv_heads == expected
    assert model.sources["num_kv_heads"] != "num_key_value_heads"


def test_short_names_are_understood(tmp_path):
    shape = {"n_layer": 12, "n_embd": 768, "n_head": 12}
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
    model = load(tmp_path, card(DENSE, *names, "head_dim", **shape))
    kv_bytes = 2 * model.num_kv_heads * model.head_dim * model.num_layers * 2 * 8192
    assert kv_bytes == 301_989_888


@pytest.mark.parametrize(
    ("count", "num_experts"),
    [
        ("num_local_experts", 8),
        ("num_experts", 128),
        ("n_routed_experts", 64),
        ("moe_num_experts", 64),
    ],
)
@pytest.mark.parametrize("top_k", ["num_experts_per_tok", "top_k_experts", "moe_top_k"])
def test_expert_fields_have_many_names(tmp_path, count, num_experts, top_k):
    content = card(MOE, "num_experts", "num_experts_per_tok", **{count: num_experts, top_k: 2})
    model = load(tmp_path, content)
    assert (model.num_experts, model.experts_per_token, model.is_moe) == (num_experts, 2, True)
    assert (model.sources["num_experts"], model.sources["experts_per_token"]) == (count, top_k)


def test_absent_expert_count_names_what_was_tried(tmp_path):
    problem = refusal(tmp_path, card(MOE, "num_experts"))
    assert "num_local_experts" in problem
    assert "n_routed_experts" in problem


def test_experts_are_never_dropped_from_a_dense_family(tmp_path):
    assert "num_experts is 8" in refusal(tmp_path, card(MOE, model_type="qwen3"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "torch.bfloat16"}, "bfloat16"),
        ({"dtype": "float32", "torch_dtype": "torch.float32"}, "float32"),
    ],
)
def test_dtype_has_two_keys_and_two_spellings(tmp_path, changes, expected):
    assert load(tmp_path, card(DENSE, "dtype", **changes)).dtype == expected


def test_absent_dtype_is_assumed_and_said_so(tmp_path):
    model = load(tmp_path, card(DENSE, "dtype"))
    assert model.dtype == "bfloat16"
    assert model.sources["dtype"].startswith("assumed")


def test_unknown_and_contradictory_dtypes_are_refused(tmp_path):
    assert "'bf17'" in refusal(tmp_path, card(DENSE, dtype="bf17"))
    both = refusal(tmp_path, card(DENSE, dtype="float16", torch_dtype="bfloat16"))
    assert "float16" in both
    assert "bfloat16" in both


def test_contradictory_names_of_one_field_are_refused(tmp_path):
    assert "keep one" in refusal(tmp_path, card(MOE, num_local_experts=16))


def test_rope_spellings_of_one_meaning_share_a_fingerprint(tmp_path):
    spelled = [
        card(DENSE, rope_scaling=None),
        card(DENSE, rope_scaling={"type": "default"}),
        card(DENSE, rope_scaling={"rope_type": "default", "factor": 1.0}),
        card(DENSE, "rope_theta", rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    ]
    models = [load(tmp_path, content) for content in spelled]
    assert {model.rope.theta for model in models} == {5e5}
    assert len({fingerprint(RunConfig(), model) for model in models}) == 1
    other = load(tmp_path, card(DENSE, rope_theta=1e6))
    assert fingerprint(RunConfig(), other) != fingerprint(RunConfig(), models[0])


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True},
        {"hidden_act": "gelu"},
        {"use_sliding_window": True, "sliding_window": 4096},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"decoder_sparse_step": 2},
        {"mlp_only_layers": [0]},
        {"n_shared_experts": 1},
        {"num_key_value_heads": 3},
        {"num_experts_per_tok": 9},
        {"hidden_size": "64"},
        {"num_hidden_layers": 0},
        {"vocab_size": True},
        {"rms_norm_eps": float("nan")},
        {"tie_word_embeddings": "no"},
        {"head_dim": 15},
        {"architectures": ["Qwen3ForCausalLM"]},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"kv_lora_rank": 512},
        {"hidden_size": 2**41},
    ],
)
def test_what_cannot_be_computed_is_refused(tmp_path, changes):
    load(tmp_path, MOE)
    refusal(tmp_path, card(MOE, **changes))


def test_unused_window_is_no_obstacle(tmp_path):
    load(tmp_path, card(MOE, use_sliding_window=False, sliding_window=4096))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"quantization_config": {"bits": 4}}, "no quant_method"),
        ({"quantization_config": {"quant_method": "foo9"}}, "'foo9'"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "'fp8'"),
    ],
)
def test_quantised_cards_are_refused_wherever_the_block_lies(tmp_path, changes, part):
    problem = refusal(tmp_path, card(MOE, **changes))
    assert part in problem
    assert "only unquantised" in problem


def test_other_families_are_named_with_the_supported_ones(tmp_path):
    problem = refusal(tmp_path, card(MOE, model_type="gpt_oss"))
    assert "'gpt_oss'" in problem
    assert "qwen3_moe" in problem
    assert "mixtral" in problem
    problem = refusal(tmp_path, card(DENSE, architectures=["Qwen3ForSequenceClassification"]))
    assert "Qwen3ForSequenceClassification" in problem


def test_architecture_alone_names_the_family(tmp_path):
    model = load(tmp_path, card(DENSE, "model_type", architectures=["Qwen3ForCausalLM"]))
    assert (model.family, model.sources["family"]) == ("qwen3", "architectures")


def test_what_is_no_card_gets_short_different_messages(tmp_path):
    good = json.dumps(DENSE)
    contents = {
        "comma.json": good[:-1] + ",}",
        "empty.json": "",
        "tokenizer_config.json": json.dumps({"tokenizer_class": "Qwen2Tokenizer"}),
        "list.json": f"[{good}]",
    }
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder").mkdir()
    paths = [*(str(tmp_path / name) for name in contents), str(tmp_path / "folder")]
    messages = set()
    for path in [*paths, str(tmp_path / "bytes.json"), "Qwen/Qwen3-Nowhere"]:
        with pytest.raises(ConfigError) as caught:
            load_model_card(path)
        assert path in str(caught.value)
        assert "\n" not in str(caught.value)
        messages.add(caught.value.problem)
    assert len(messages) == 7
    assert any("tiny-moe" in message for message in messages)


@pytest.mark.parametrize("text", ['{"a":' * 100_000, '{"a": ' + "1" * 5000 + "}"])
def test_card_too_deep_or_too_large_is_refused(tmp_path, text):
    (tmp_path / "card.json").write_text(text)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_model_card(str(tmp_path / "card.json"))
